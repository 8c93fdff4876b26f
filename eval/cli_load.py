"""`cacheblend eval load`: TTFT and throughput of servers under requests at random moments."""

import asyncio
import itertools
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.base.errors import ConfigError
from cacheblend.cli import options, terminal
from cacheblend.eval.data import DATA_SETS, DATA_VARIABLE, data_set, find_file, read_examples
from cacheblend.eval.load import LoadRequest, Target, own_targets, peer_target, run_load
from cacheblend.eval.method_plan import listed, numbers


def load(
    name: Annotated[str, typer.Argument(metavar="DATA_SET", help=f"One of {', '.join(DATA_SETS)}.")],
    address: Annotated[str | None, typer.Option(help="URL of a running `cacheblend serve`, without /v1.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated methods of that service.")] = "full_recompute,blend",
    peer: Annotated[
        list[str] | None, typer.Option(help="NAME=URL of another OpenAI-compatible server, without /v1; repeat for more.")
    ] = None,
    data: Annotated[str | None, typer.Option(envvar=DATA_VARIABLE, help="The set's file, or a folder that has it.")] = None,
    cases: Annotated[int, typer.Option(help="Questions from the file's start, divided among the rates.", min=1)] = 60,
    num_chunks: Annotated[int, typer.Option(help="Upper bound on the passages of a prompt.", min=2)] = 10,
    rates: Annotated[str, typer.Option(help="Comma-separated arrivals a second.")] = "0.5,1,2",
    max_tokens: Annotated[int, typer.Option(help="Upper bound on an answer's tokens.", min=1)] = 16,
    timeout_s: Annotated[float, typer.Option(help="A request without a byte for this many seconds has failed.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Draws the arrivals.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="CACHEBLEND_API_KEY", help="Sent to our own service.")] = None,
    peer_api_key: Annotated[str | None, typer.Option(envvar="CACHEBLEND_PEER_API_KEY", help="Sent to the peers.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw the median TTFT against the rate, as FILE.png, with FILE.csv beside.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Ask servers a data set's questions at random moments, at several rates: percentiles of TTFT, and throughput.

    Examples:

        cacheblend eval load squad_shared --address http://127.0.0.1:8000
        cacheblend eval load squad_shared --peer vllm=http://127.0.0.1:8001
    """
    if figure is not None and figure.suffix != ".png":
        raise ConfigError("figure", str(figure), "a .png")
    wording, examples = data_set(name).wording, read_examples(find_file(name, data))
    requests = [LoadRequest.from_example(example, wording, num_chunks) for example in itertools.islice(examples, cases)]
    targets: list[Target] = [] if address is None else own_targets(_base(address), listed(methods), api_key)
    for text in peer or ():
        label, equals, url = text.partition("=")
        if not equals or not label or not url.startswith(("http://", "https://")):
            raise ConfigError("peer", text, "NAME=URL, such as vllm=http://127.0.0.1:8001")
        targets.append(peer_target(label, _base(url), peer_api_key))
    if not targets:
        raise ConfigError("address", address, "the URL of a running `cacheblend serve`, or give a --peer")
    swept = numbers("rates", rates)
    with terminal.progress_bars() as progress:
        loading = run_load(
            targets, requests, swept, max_tokens=max_tokens, timeout_s=timeout_s, seed=seed, on_progress=progress
        )
        steps = asyncio.run(loading)
    columns = ("target", "rate_rps", "answered", "requests", "ttft_s_p50", "ttft_s_p90", "ttft_s_p99", "throughput_rps")
    rows = ([f"{step[name]:.3g}" if isinstance(step[name], float) else step[name] for name in columns] for step in steps)
    if as_json:
        terminal.print_json({"data_set": name, "cases": len(requests), "steps": steps})
    else:
        terminal.print_table(columns, rows)
    for step in steps:
        if not step["answered"]:
            terminal.note(f"{step['target']} answered none at {step['rate_rps']:g} a second: {step['first_error']}")
    if not any(step["answered"] for step in steps):
        raise typer.Exit(1)
    if figure is not None:
        from cacheblend.eval.run.report import draw_lines

        draw_lines(
            figure,
            [("requests a second", step["target"], step["rate_rps"], step["ttft_s_p50"]) for step in steps if step["answered"]],
            y="TTFT, median (s)",
            log_x=True,
            log_y=True,
        )


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
