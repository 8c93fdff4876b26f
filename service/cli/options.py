"""Options that several commands share; their defaults are the config's own."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend.base.errors import ConfigError
from cacheblend.blend import SELECTORS, FusionConfig
from cacheblend.service.engine.config import EngineConfig

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
ENGINE = "Engine"
MODEL_HELP = "Model directory, GGUF file, hub id, or known name (cacheblend model ls)."

Model = Annotated[str, typer.Option("--model", "-m", envvar="CACHEBLEND_MODEL", help=MODEL_HELP)]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="CACHEBLEND_MODEL",
        help=f"{MODEL_HELP[:-1]}; left out, the packaged reader, and its corpus where there is no store yet.",
    ),
]
StoreDir = Annotated[
    Path, typer.Option("--store-dir", "-s", envvar="CACHEBLEND_STORE_DIR", help="Folder of the chunk KV and the index.")
]
DEFAULT_STORE_DIR = Path("cacheblend-store")
Device = Annotated[
    str, typer.Option("--device", envvar="CACHEBLEND_DEVICE", help="auto, cpu, cuda, cuda:N.", rich_help_panel=ENGINE)
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        envvar="CACHEBLEND_DTYPE",
        help="auto (the checkpoint's, if 16-bit and fast on the device, else float32), float32, bfloat16 or float16.",
        rich_help_panel=ENGINE,
    ),
]
ChunkTokens = Annotated[
    int,
    typer.Option(
        "--chunk-tokens",
        envvar="CACHEBLEND_CHUNK_TOKENS",
        help="Tokens of the model in a chunk; fixed once documents are ingested.",
        rich_help_panel=ENGINE,
    ),
]
ChunkOverlapTokens = Annotated[
    int,
    typer.Option(
        "--chunk-overlap-tokens",
        envvar="CACHEBLEND_CHUNK_OVERLAP_TOKENS",
        help="Tokens that a chunk repeats from the one before.",
        rich_help_panel=ENGINE,
    ),
]
EmbedderName = Annotated[
    str,
    typer.Option(
        "--embedder",
        envvar="CACHEBLEND_EMBEDDER",
        help="sentence-transformers model: a name or a folder.",
        rich_help_panel=ENGINE,
    ),
]
RamBudget = Annotated[
    int,
    typer.Option(
        "--ram-budget-bytes",
        envvar="CACHEBLEND_RAM_BUDGET_BYTES",
        help="Most bytes of KV held in RAM.",
        rich_help_panel=ENGINE,
    ),
]
NvmeBudget = Annotated[
    int,
    typer.Option(
        "--nvme-budget-bytes",
        envvar="CACHEBLEND_NVME_BUDGET_BYTES",
        help="Most bytes of KV on disk; the least recently used goes first.",
        rich_help_panel=ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        envvar="CACHEBLEND_KV_CACHE_DTYPE",
        help="How KV is stored: raw (exact), fp8_e4m3, int8 or int4.",
        rich_help_panel=ENGINE,
    ),
]
PrefixBudget = Annotated[
    int,
    typer.Option(
        "--prefix-budget-bytes",
        envvar="CACHEBLEND_PREFIX_BUDGET_BYTES",
        help="Most bytes of KV held in RAM of what prompts begin with: system messages, conversations so far.",
        rich_help_panel=ENGINE,
    ),
]
DirectReads = Annotated[
    bool,
    typer.Option(
        "--direct-reads",
        envvar="CACHEBLEND_DIRECT_READS",
        help="Read KV past the page cache, for a store larger than RAM.",
        rich_help_panel=ENGINE,
    ),
]
ContextFiller = Annotated[
    str,
    typer.Option(
        "--context-filler",
        envvar="CACHEBLEND_CONTEXT_FILLER",
        help="Passages that every chunk's KV is computed after: auto (the model's or the package's), none, or a text file.",
        rich_help_panel=ENGINE,
    ),
]
ContextDocumentTokens = Annotated[
    int,
    typer.Option(
        "--context-document-tokens",
        envvar="CACHEBLEND_CONTEXT_DOCUMENT_TOKENS",
        help="Window in which a document is read, so that a chunk's KV is computed after its document's earlier text; 0: none.",
        rich_help_panel=ENGINE,
    ),
]
Selector = Annotated[
    str | None,
    typer.Option(
        "--selector",
        envvar="CACHEBLEND_SELECTOR",
        help=f"How the tokens to recompute are selected: {', '.join(SELECTORS)} (gradual: the paper's HKVD tokens); "
        f"left out, the calibrated one, or {FusionConfig().selector}.",
        rich_help_panel=ENGINE,
    ),
]
AllowUnverified = Annotated[
    bool,
    typer.Option(
        "--allow-unverified", help="Take a model of an unverified family if the built-in check passes.", rich_help_panel=ENGINE
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; progress and logs on stderr.")]


def listed(text: str) -> list[str]:
    """The parts of a comma-separated option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def ratios(text: str) -> list[float]:
    """The numbers of a comma-separated option of recompute ratios; raises ConfigError where one is none."""
    try:
        return [float(part) for part in listed(text)]
    except ValueError as error:
        raise ConfigError("ratios", text, "numbers from 0 to 1, separated by commas") from error
