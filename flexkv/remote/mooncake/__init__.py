"""Mooncake Store as a `Store`: `store` moves values, `client` sets the library up and watches its master."""

from flexkv.remote.mooncake.client import CLIENT_ENVIRONMENT
from flexkv.remote.mooncake.store import MooncakeStore

__all__ = ["CLIENT_ENVIRONMENT", "MooncakeStore"]
