"""`cacheblend serve` and `cacheblend api-key`: the HTTP API."""

import gc
import logging
import logging.config
import os
import signal
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from cacheblend.base.errors import ConfigError, InputError, ServiceError, needs_extra
from cacheblend.base.memory import hold_freed_memory
from cacheblend.base.options import from_options
from cacheblend.base.threads import in_own_thread
from cacheblend.service.engine.config import EngineConfig
from cacheblend.service.http.config import LOOPBACK, HttpConfig, TenantConfig, hash_key, new_key
from cacheblend.service.serving.config import ServingConfig

from . import options, terminal
from .model import DEFAULT, choose_model

logger = logging.getLogger(__name__)


def tenants_of(tables: object) -> list[TenantConfig]:
    """The tenants of a file's tables. Values, which may be keys, are not shown in the ConfigError of a wrong or missing one."""
    if not isinstance(tables, Mapping) or not tables:
        remedy = "a [tenants.NAME] table for each, or no tenants at all, which opens the API to everybody"
        raise ConfigError("tenants", type(tables).__name__, remedy)
    tenants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ConfigError(f"tenants.{name}", type(table).__name__, "a [tenants.NAME] table with api_key_sha256")
        hashes = table.get("api_key_sha256", [])
        own = {"name": name, "api_key_sha256": tuple(hashes) if isinstance(hashes, list) else (hashes,)}
        tenants.append(from_options(TenantConfig, {**table, **own}))
    return tenants


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address, to which nobody can connect before the service listens; ServiceError if it cannot be had."""
    # Of a socket of no named protocol asyncio does not switch off Nagle's algorithm: the first token would wait for the
    # client's acknowledgement of the headers, which takes 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServiceError(f"{host}:{port} cannot be listened on ({error.strerror}); give another --port or --host") from None
    return listener


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults, so that flags and variables win over them."""
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    known = {parameter.name or "" for parameter in context.command.params} - {"config"}
    if unknown := sorted(values.keys() - known - {"tenants"}):  # whose values may be keys in the wrong place, and are not shown
        allowed = get_close_matches(unknown[0], known) or sorted(known)
        raise ConfigError("option", unknown[0], f"{file} may set {', '.join(allowed)}, and [tenants.NAME] tables")
    context.default_map = {**(context.default_map or {}), **values}
    return file


@options.accepts(HttpConfig, ServingConfig, EngineConfig)
def serve(
    context: typer.Context,
    model: options.Model = None,
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
    yes: options.Fetch = False,
    *,
    settings: options.Settings,
) -> None:
    """Serve the OpenAI-shaped HTTP API and the web page, until interrupted. Logs go to stderr.

    Examples:

        cacheblend serve
        cacheblend serve --model ./model --store-dir ./my-store
        cacheblend serve --config cacheblend.toml --port 9000
    """
    if os.environ.get("CACHEBLEND_API_KEY") == "":
        raise ConfigError("CACHEBLEND_API_KEY", "", "a key, or unset it: an empty one would open the API to everybody")
    http, serving = settings.make(HttpConfig), settings.make(ServingConfig)
    tables = (context.default_map or {}).get("tenants")
    tenants = [] if tables is None else tenants_of(tables)
    if http.require_key and not tenants and http.api_key is None and http.host not in LOOPBACK:
        allowed = "needed to listen on other addresses than this machine's: set CACHEBLEND_API_KEY, or name tenants in --config"
        raise ConfigError("api_key", None, allowed)
    engine = settings.make(EngineConfig, model=model or DEFAULT, store_dir=store_dir)  # before anything is loaded or fetched
    hold_freed_memory()
    engine = replace(engine, model=choose_model(model, yes=yes))
    # Until `run` has handlers of its own: a container's first process ignores a signal that has none.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    with bind(http.host, http.port) as listener:
        # Libraries take seconds to load: a port that is in use is refused before.
        terminal.hush_libraries()
        with needs_extra("server"):
            from cacheblend.service.http.app import log_config, run
            from cacheblend.service.http.server import Server

        level = logging.getLogger().level
        logging.config.dictConfig(log_config(logging.INFO if level in (logging.NOTSET, logging.WARNING) else level))
        logger.info("the service is starting; it will listen on %s:%d", *listener.getsockname()[:2])

        with in_own_thread(Server, engine, serving, http, tenants) as server:
            in_own_thread(server.warm_up)
            # What was loaded stays: a full collection over its half a million objects would hold Python's lock for 0.3 s.
            gc.collect()
            gc.freeze()
            run(server, listener)


def api_key(as_json: options.Json = False) -> None:
    """Make an API key for a tenant, and print it with the hash that stands in the config file.

    Examples:

        cacheblend api-key
    """
    key = new_key()
    digest = hash_key(key)
    advice = "Give the key to the tenant, and put the hash in [tenants.NAME]; the key is stored nowhere."
    shown = f"key             {key}\napi_key_sha256  {digest}\n{advice}"
    terminal.print_result({"key": key, "api_key_sha256": digest}, shown, as_json)
