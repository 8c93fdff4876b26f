"""The HTTP API, shaped like OpenAI's."""

from .app import create_app
from .config import HttpConfig
from .server import Server
from .tenants import TenantConfig

__all__ = ["HttpConfig", "Server", "TenantConfig", "create_app"]
