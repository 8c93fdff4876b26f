"""The command line: `cacheblend ingest | ask | serve | api-key | demo | profile | plan | model | documents | store`."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from cacheblend.base.errors import CacheBlendError, ConfigError, InputError

from . import ask as cli_ask
from . import documents, model, profile, serve
from . import store as cli_store
from .options import stderr, stdout
from .terminal import VisibleFormatter, visible

app = typer.Typer(
    name="cacheblend",
    help="Answer questions over documents several times sooner: every chunk's KV cache is kept and blended into the prompt.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ingest")(documents.ingest)
app.command("ask")(cli_ask.ask)
app.command("serve")(serve.serve)
app.command("api-key")(serve.api_key)
app.command("profile")(profile.profile)
app.command("plan")(profile.plan)
app.add_typer(model.app, name="model")
app.add_typer(documents.app, name="documents")
app.add_typer(cli_store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        stdout.print(f"cacheblend {version('cacheblend')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and debug logs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, errors alone.")] = False,
    version: Annotated[  # noqa: ARG001  # its callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    stderr.quiet = quiet
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR if quiet else logging.WARNING, handlers=[handler])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 for a failure or an interrupt, 2 for usage."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        app(arguments)
    except (CacheBlendError, OSError) as error:
        if debug:
            raise
        print(visible(f"error: {error}"), file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | InputError) else 1)
    except Exception as error:
        if debug:
            raise
        unforeseen = f"error: {type(error).__name__}: {error} (unforeseen; run with --debug and report it)"
        print(visible(unforeseen), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
