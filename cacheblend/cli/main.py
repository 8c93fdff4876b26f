"""The command line. A command's module is imported when it is used, so that `--help` costs no model library."""

import logging
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from cacheblend.base.errors import CacheBlendError, ConfigError, InputError

from . import terminal

HELP = ["-h", "--help"]


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is invoked; `target` is `module:attribute`, a function or a `typer.Typer`."""

    def __init__(self, name: str, target: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._target = target

    def load(self) -> Any:
        """The command itself, or the group of them."""
        module, _, attribute = self._target.partition(":")
        target = getattr(import_module(module), attribute)
        holder = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        if isinstance(target, typer.Typer):
            holder.add_typer(target, name=self.name)
        else:
            holder.command(self.name)(target)
        command = get_group(holder).commands[str(self.name)]
        for each in (command, *getattr(command, "commands", {}).values()):
            _untyped_flags(each.get_params(typer.Context(each, help_option_names=HELP)))
            # The first of the later paragraphs would outdent those after it, and examples be one line.
            each.help = (each.help or "").replace("\n\nExamples:", "\n\n\n\nExamples:")
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments of the command itself; its context names it, so that it is what is invoked."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


def _untyped_flags(parameters: list[Any]) -> list[Any]:
    """The parameters, of which help shows no `<bool>` after a flag, as if it took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


_HERE, _EVAL = "cacheblend.cli", "cacheblend.eval"
COMMANDS = (
    LazyCommand("demo", f"{_EVAL}.cli_demo:demo", "Ingest documents, ask, and print the methods side by side."),
    LazyCommand("ingest", f"{_HERE}.ingest:ingest", "Split, index and precompute documents."),
    LazyCommand("reindex", f"{_HERE}.ingest:reindex", "Compute the ingested documents' KV for another model."),
    LazyCommand("ask", f"{_HERE}.ask:ask", "Answer a question from the ingested documents' stored KV."),
    LazyCommand("explain", f"{_HERE}.explain:explain", "Show which passages are found in a request's messages, and why."),
    LazyCommand("serve", f"{_HERE}.serve:serve", "Serve the OpenAI-shaped HTTP API and the web page, until interrupted."),
    LazyCommand("api-key", f"{_HERE}.serve:api_key", "Make an API key for a tenant, and the hash for the config file."),
    LazyCommand("profile", f"{_HERE}.model:profile", "Measure prefill, recompute and each tier's throughput."),
    LazyCommand("plan", f"{_HERE}.model:plan", "Show a model's memory and disk; compare storage devices."),
    LazyCommand("calibrate", f"{_EVAL}.cli_calibrate:calibrate", "Measure what blending loses on your documents."),
    LazyCommand("eval", f"{_EVAL}.cli_eval:app", "Measure quality and TTFT of the methods side by side on a data set."),
    LazyCommand("model", f"{_HERE}.model:app", "Fetch small pretrained models, and list them."),
    LazyCommand("documents", f"{_HERE}.store:documents", "List, show and delete ingested documents."),
    LazyCommand("store", f"{_HERE}.store:app", "Check stores of chunk KV and their index."),
)


class _LazyGroup(TyperGroup):
    """The commands of `COMMANDS`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in COMMANDS:
            self.add_command(command)

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped_flags(super().get_params(ctx))


app = typer.Typer(
    name="cacheblend",
    cls=_LazyGroup,
    help="Answer questions over documents with a short time to first token: chunks' KV caches are stored and blended.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": HELP},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        terminal.print_line(f"cacheblend {version('cacheblend')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Print tracebacks and debug logs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, errors alone.")] = False,
    version: Annotated[  # noqa: ARG001  # its callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    terminal.stderr.quiet = quiet
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(terminal.VisibleFormatter("%(levelname)s %(name)s: %(message)s"))
    level = logging.DEBUG if debug else logging.ERROR if quiet else logging.WARNING
    handler.setLevel(level)  # `shown_stages` lowers the level of our own loggers alone
    logging.basicConfig(level=level, handlers=[handler])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 0, 1 for a failure, 2 for usage, 128 and the signal's number for an interrupt."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(arguments)
    except Exception as error:
        if "--debug" in arguments:
            raise
        line = f"error: {error}"
        if not isinstance(error, CacheBlendError | OSError):
            line = f"error: {type(error).__name__}: {error} (unforeseen; run with --debug and report it)"
        print(terminal.visible(line), file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | InputError) else 1)
