"""The HTTP API, shaped like OpenAI's."""

from cacheblend.base.extras import needs_extra

with needs_extra("server"):
    from .app import create_app
    from .auth import TenantConfig
    from .config import HttpConfig
    from .server import Server

__all__ = ["HttpConfig", "Server", "TenantConfig", "create_app"]
