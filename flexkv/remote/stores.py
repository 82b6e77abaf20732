"""Opens a client of the store with given URLs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from flexkv.errors import StoreError
from flexkv.remote.base import Store, StoreOptions, masked_url

SCHEMES: dict[str, tuple[str, str]] = {
    "redis": ("flexkv.remote.redis.store", "RedisStore"),
    "rediss": ("flexkv.remote.redis.store", "RedisStore"),
    "mooncake": ("flexkv.remote.mooncake", "MooncakeStore"),
}
"""Module and class of the client for each URL scheme. Module and library are imported only when a store with that
scheme is opened.
"""


def open_store(options: StoreOptions) -> Store:
    """Returns a client of the store at `options.urls`. Does not check whether the store is alive; see `Store.alive`.

    Raises:
        StoreError: the scheme is unknown, the URLs have different schemes, the store does not support the options, or
            its library cannot be loaded.
    """
    schemes = sorted({url.partition("://")[0].lower() for url in options.urls})
    if len(schemes) != 1 or schemes[0] not in SCHEMES:
        shown = [masked_url(url) for url in options.urls]
        raise StoreError(
            f"remote.urls={shown}: allowed are URLs of one scheme of {', '.join(sorted(SCHEMES))}"
        )
    module, name = SCHEMES[schemes[0]]
    make: Callable[[StoreOptions], Store] = getattr(import_module(module), name)
    return make(options)
