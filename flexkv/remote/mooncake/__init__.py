"""A client of Mooncake Store as a `Store`: `store` moves values, `client` sets up the library and watches the
master.
"""

from flexkv.remote.mooncake.client import CLIENT_ENVIRONMENT
from flexkv.remote.mooncake.store import MooncakeStore

__all__ = ["CLIENT_ENVIRONMENT", "MooncakeStore"]
