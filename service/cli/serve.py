"""`cacheblend serve` and `cacheblend api-key`: the HTTP API."""

from __future__ import annotations

import errno
import logging
import os
import socket
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend.base.errors import ConfigError, InputError
from cacheblend.service.http.config import HttpConfig
from cacheblend.service.http.tenants import TenantConfig, hash_key, new_key
from cacheblend.service.serving.config import ServingConfig

from . import options, terminal
from .options import DEFAULTS

TENANT_FIELDS = {field.name: field for field in fields(TenantConfig) if field.name != "name"}


def read_serve_file(file: Path, known: Collection[str]) -> dict[str, Any]:
    """The options of a file; `known` names those there are.

    Raises:
        InputError: the file cannot be read, or is not TOML.
        ConfigError: an option that there is not.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    for name in values:  # whose value may be a key in the wrong place, and is not shown
        if name not in known and name != "tenants":
            raise ConfigError("option", name, f"{file} may set {', '.join(sorted(known))}, and [tenants.NAME] tables")
    if "tenants" in values and (not isinstance(values["tenants"], dict) or not values["tenants"]):
        remedy = f"{file} must have a [tenants.NAME] table for each, or no tenants at all, which opens the API to everybody"
        raise ConfigError("tenants", type(values["tenants"]).__name__, remedy)
    return values


def tenants_of(tables: Mapping[str, Any]) -> list[TenantConfig]:
    """The tenants of a file's tables.

    Raises:
        ConfigError: a table has another field, or misses one.
    """
    tenants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"tenants.{name}", type(table).__name__, f"a [tenants.NAME] table of {', '.join(TENANT_FIELDS)}")
        given = dict(table)
        for field in given:  # whose value may be the key itself, and is not shown
            if field not in TENANT_FIELDS:
                raise ConfigError(f"tenants.{name}", field, f"its fields are {', '.join(TENANT_FIELDS)}")
        for field, declared in TENANT_FIELDS.items():
            if declared.default is MISSING and field not in given:
                raise ConfigError(
                    f"tenants.{name}.{field}", None, "it is needed; `cacheblend api-key` makes a key and its hash"
                )
        keys = given.pop("api_key_sha256")
        if not isinstance(keys, str | list):
            raise ConfigError(f"tenants.{name}.api_key_sha256", type(keys).__name__, "a hash, or a list of hashes")
        tenants.append(TenantConfig(name=name, api_key_sha256=(keys,) if isinstance(keys, str) else tuple(keys), **given))
    return tenants


HTTP: dict[str, Any] = {field.name: field.default for field in fields(HttpConfig)}
SERVING: dict[str, Any] = {field.name: field.default for field in fields(ServingConfig)}
API = "API"
LIMITS = "Limits"
GUARD = "Quality guard"


def _option(name: str, help_: str, panel: str = API) -> Any:
    flag = f"--{name.replace('_', '-')}"
    return typer.Option(flag, envvar=f"CACHEBLEND_{name.upper()}", help=help_, rich_help_panel=panel)


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    """The file's values become the defaults, so flags and variables win over them."""
    if file is not None:
        known = {parameter.name or "" for parameter in context.command.params} - {"config", "as_json"}
        context.default_map = {**(context.default_map or {}), **read_serve_file(file, known)}
    return file


def serve(
    context: typer.Context,
    model: options.OptionalModel = None,
    config: Annotated[  # noqa: ARG001  # its callback has put the values where the other options find them
        Path | None,
        typer.Option(
            "--config",
            "-c",
            envvar="CACHEBLEND_CONFIG",
            help="TOML file with any of these options by name (max_num_seqs = 8), and [tenants.NAME] tables.",
            callback=_read_config,
            is_eager=True,
        ),
    ] = None,
    store_dir: options.StoreDir = options.DEFAULT_STORE_DIR,
    host: Annotated[str, _option("host", "Address to listen on.")] = HTTP["host"],
    port: Annotated[int, _option("port", "0 takes any free one.")] = HTTP["port"],
    served_model_name: Annotated[str | None, _option("served_model_name", "What clients call the model.")] = HTTP[
        "served_model_name"
    ],
    cors_origins: Annotated[
        list[str] | None, _option("cors_origins", "A web origin whose pages may call the API; repeat for more.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None, _option("allowed_hosts", "A host name that requests may be addressed to; repeat for more.")
    ] = None,
    max_body_bytes: Annotated[int, _option("max_body_bytes", "Larger uploads are refused.", LIMITS)] = HTTP["max_body_bytes"],
    max_completion_bytes: Annotated[int, _option("max_completion_bytes", "Larger questions are refused.", LIMITS)] = HTTP[
        "max_completion_bytes"
    ],
    max_documents: Annotated[int, _option("max_documents", "Documents of one call.", LIMITS)] = HTTP["max_documents"],
    max_num_seqs: Annotated[int, _option("max_num_seqs", "Requests that hold a KV cache at once.", LIMITS)] = SERVING[
        "max_num_seqs"
    ],
    max_waiting: Annotated[int, _option("max_waiting", "Waiting requests of a tenant.", LIMITS)] = SERVING["max_waiting"],
    max_uploads: Annotated[int, _option("max_uploads", "Waiting and running uploads of a tenant.", LIMITS)] = SERVING[
        "max_uploads"
    ],
    max_document_calls: Annotated[
        int, _option("max_document_calls", "Lists, deletions and so on of a tenant, waiting and running.", LIMITS)
    ] = SERVING["max_document_calls"],
    ingest_share: Annotated[
        float, _option("ingest_share", "Of the time, for uploads, while requests run or wait.", LIMITS)
    ] = SERVING["ingest_share"],
    decode_share: Annotated[
        float, _option("decode_share", "Of the time, for those that decode, while a prompt is prefilled.", LIMITS)
    ] = SERVING["decode_share"],
    deadline_s: Annotated[float, _option("deadline_s", "Seconds for a request.", LIMITS)] = SERVING["deadline_s"],
    grace_s: Annotated[float, _option("grace_s", "Seconds to finish in when stopped.", LIMITS)] = SERVING["grace_s"],
    stall_s: Annotated[float, _option("stall_s", "Seconds without a step after which /readyz says so.", LIMITS)] = SERVING[
        "stall_s"
    ],
    guard_share: Annotated[
        float, _option("guard_share", "0..1 of the blended requests checked against full prefill when idle.", GUARD)
    ] = SERVING["guard_share"],
    guard_tokens: Annotated[int, _option("guard_tokens", "First tokens that are compared.", GUARD)] = SERVING["guard_tokens"],
    guard_floor: Annotated[
        float, _option("guard_floor", "0..1; below this mean agreement more is recomputed. 0 measures alone.", GUARD)
    ] = SERVING["guard_floor"],
    guard_window: Annotated[int, _option("guard_window", "Checked requests of the mean.", GUARD)] = SERVING["guard_window"],
    max_tokens: Annotated[
        int | None,
        _option("max_tokens", "Most tokens of an answer, unless its request says otherwise; left out, as many as fit.", LIMITS),
    ] = DEFAULTS["max_tokens"],
    recompute_ratio: Annotated[
        float | None, _option("recompute_ratio", "0..1; left out, the controller picks it.", options.ENGINE)
    ] = DEFAULTS["recompute_ratio"],
    on_miss: Annotated[
        str, _option("on_miss", "Chunks that are not stored: recompute (exact, stored later) or precompute.", options.ENGINE)
    ] = DEFAULTS["on_miss"],
    device: options.Device = DEFAULTS["device"],
    dtype: options.Dtype = DEFAULTS["dtype"],
    chunk_tokens: options.ChunkTokens = DEFAULTS["chunk_tokens"],
    chunk_overlap_tokens: options.ChunkOverlapTokens = DEFAULTS["chunk_overlap_tokens"],
    embedder: options.EmbedderName = DEFAULTS["embedder"],
    ram_budget_bytes: options.RamBudget = DEFAULTS["ram_budget_bytes"],
    nvme_budget_bytes: options.NvmeBudget = DEFAULTS["nvme_budget_bytes"],
    prefix_budget_bytes: options.PrefixBudget = DEFAULTS["prefix_budget_bytes"],
    unsalted_share: Annotated[
        float, _option("unsalted_share", "0..1 of each budget, reserved for KV without a cache salt.", options.ENGINE)
    ] = DEFAULTS["unsalted_share"],
    salt_share: Annotated[
        float, _option("salt_share", "0..1 of each budget, reserved for each of the salts used last.", options.ENGINE)
    ] = DEFAULTS["salt_share"],
    direct_reads: options.DirectReads = DEFAULTS["direct_reads"],
    selector: options.Selector = DEFAULTS["selector"],
    context_filler: options.ContextFiller = DEFAULTS["context_filler"],
    context_document_tokens: options.ContextDocumentTokens = DEFAULTS["context_document_tokens"],
    kv_cache_dtype: options.KvCacheDtype = DEFAULTS["kv_cache_dtype"],
    allow_unverified: options.AllowUnverified = DEFAULTS["allow_unverified"],
) -> None:
    """Serve the OpenAI-shaped HTTP API and the web page, until interrupted. Logs are JSON lines on stderr.

    Examples:
        cacheblend serve

        cacheblend serve --model ./model --store-dir ./store

        cacheblend serve --config cacheblend.toml --port 9000
    """
    terminal.hush_libraries()
    from cacheblend.base.process import hold_freed_memory, in_own_thread
    from cacheblend.service.engine.config import EngineConfig
    from cacheblend.service.http import HttpConfig, Server
    from cacheblend.service.http.observability import log_json
    from cacheblend.service.http.run import run

    from .model import bundled_corpus, choose_model

    _check_address(host, port)
    hold_freed_memory()
    chosen = choose_model(model, chunk_tokens, store_dir)
    engine_config = EngineConfig(
        model=chosen.model,
        store_dir=store_dir,
        device=device,
        dtype=dtype,
        chunk_tokens=chosen.chunk_tokens,
        chunk_overlap_tokens=chunk_overlap_tokens,
        embedder=embedder,
        ram_budget_bytes=ram_budget_bytes,
        nvme_budget_bytes=nvme_budget_bytes,
        prefix_budget_bytes=prefix_budget_bytes,
        unsalted_share=unsalted_share,
        salt_share=salt_share,
        direct_reads=direct_reads,
        selector=selector,
        context_filler=context_filler,
        context_document_tokens=context_document_tokens,
        on_miss=on_miss,
        kv_cache_dtype=kv_cache_dtype,
        recompute_ratio=recompute_ratio,
        max_tokens=max_tokens,
        allow_unverified=allow_unverified,
    )
    serving = ServingConfig(
        max_num_seqs=max_num_seqs,
        max_waiting=max_waiting,
        max_uploads=max_uploads,
        max_document_calls=max_document_calls,
        ingest_share=ingest_share,
        decode_share=decode_share,
        deadline_s=deadline_s,
        grace_s=grace_s,
        stall_s=stall_s,
        guard_share=guard_share,
        guard_tokens=guard_tokens,
        guard_floor=guard_floor,
        guard_window=guard_window,
    )
    http = HttpConfig(
        host=host,
        port=port,
        served_model_name=served_model_name,
        max_body_bytes=max_body_bytes,
        max_completion_bytes=max_completion_bytes,
        max_documents=max_documents,
        cors_origins=tuple(cors_origins or ()),
        allowed_hosts=tuple(allowed_hosts or ()),
    )
    tables: Mapping[str, object] = (context.default_map or {}).get("tenants", {})
    log_json(min(logging.INFO, logging.getLogger().level or logging.INFO))
    with in_own_thread(Server, engine_config, serving, http, tenants_of(tables)) as server:
        if chosen.wants_corpus and not tables:
            in_own_thread(server.engines[""].ingest, bundled_corpus())
        run(server)


def _check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on before a model is loaded."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OverflowError:  # `HttpConfig` refuses it
        return
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            return  # a name that the server itself resolves in another way
        allowed = f"{host}:{port} cannot be listened on ({os.strerror(error.errno)}); give another --port or --host"
        raise ConfigError("port", port, allowed) from None


def api_key(as_json: options.Json = False) -> None:
    """Make an API key for a tenant, and print it with the hash that stands in the config file.

    Example:
        cacheblend api-key
    """
    key = new_key()
    digest = hash_key(key)
    if as_json:
        terminal.print_json({"key": key, "api_key_sha256": digest})
        return
    terminal.stdout.print(f"key             {key}\napi_key_sha256  {digest}", highlight=False, markup=False, soft_wrap=True)
    terminal.stdout.print("Give the key to the tenant, and put the hash in [tenants.NAME]; the key is kept nowhere.")
