"""The HTTP API, shaped like OpenAI's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from .app import create_app as create_app
    from .auth import TenantConfig as TenantConfig
    from .config import HttpConfig as HttpConfig
    from .server import Server as Server

_MODULES = {
    ".app": ("create_app",),
    ".auth": ("TenantConfig",),
    ".config": ("HttpConfig",),
    ".server": ("Server",),
}
__all__, __getattr__ = lazy_names(__name__, _MODULES, extra="server")
