"""The HTTP API, shaped like OpenAI's."""

from .app import create_app
from .auth import TenantConfig
from .config import HttpConfig
from .server import Server

__all__ = ["HttpConfig", "Server", "TenantConfig", "create_app"]
