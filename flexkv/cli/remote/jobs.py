"""The jobs of `flexkv remote`. Each opens a client of the store and closes it at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexkv.cli.remote.bench import bench
from flexkv.cli.remote.stored_value import StoredValue, read_value
from flexkv.errors import StoreError
from flexkv.observe import unix_now_s
from flexkv.remote.base import NO_VALUE, NOT_SAID, Outcome, Presence, Store, StoreOptions, masked_url
from flexkv.remote.stores import open_store

MOST_VALUE_BYTES = 1 << 30
"""`look` refuses larger values, because it reads each value into memory. Engines' values are a few MiB in size."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Whether one server of a store can be used, and how fast it answers.

    Attributes:
        url: the server's URL, without secrets.
        why_not: why the server cannot be used; empty if it can.
        first_ms: milliseconds of the first question, including the connection, the login and the library's start.
        round_trip_ms: milliseconds of the second question; None if the server did not answer both.
    """

    url: str
    why_not: str
    first_ms: float
    round_trip_ms: float | None


@contextmanager
def opened(options: StoreOptions) -> Iterator[Store]:
    store = open_store(options)
    try:
        yield store
    finally:
        store.close()


def ping(options: StoreOptions, deadline_s: float) -> list[Reached]:
    """Asks each server twice whether it is alive. The first question includes connecting; the second one measures a
    round trip alone.
    """
    found = []
    for url in options.urls:
        with opened(replace(options, urls=(url,))) as store:
            began_s = time.perf_counter()
            why = store.alive(deadline_s)
            first_s = time.perf_counter() - began_s
            again_s = None
            if not why:
                began_s = time.perf_counter()
                why = store.alive(deadline_s)
                again_s = time.perf_counter() - began_s
        round_trip_ms = None if why or again_s is None else again_s * 1e3
        found.append(Reached(masked_url(url), why, first_s * 1e3, round_trip_ms))
    return found


def look(options: StoreOptions, names: Sequence[str], deadline_s: float) -> list[StoredValue | None]:
    """Reads each value and returns the content of its trailer; None for a name that the store does not have.

    Raises:
        StoreError: the store cannot be reached.
    """
    with opened(options) as store:
        return [_look_at(store, name, deadline_s) for name in names]


def _look_at(store: Store, name: str, deadline_s: float) -> StoredValue | None:
    (size,) = store.sizes([name], deadline_s)
    if size == NO_VALUE:
        return None
    if size == NOT_SAID:
        why = store.last_error or "it did not answer"
        if store.alive(deadline_s):
            raise StoreError(why)
        return StoredValue(name, 0, f"the store did not say what it has: {why}")
    if size > MOST_VALUE_BYTES:
        return StoredValue(name, size, f"it has more than {MOST_VALUE_BYTES >> 20} MiB")
    value = np.zeros(size, np.uint8)
    (outcome,) = store.get([name], [[value]], deadline_s)
    if outcome is Outcome.ABSENT:
        return None
    if outcome is Outcome.OK:
        return read_value(name, value, unix_now_s())
    return StoredValue(name, size, f"it cannot be read: {store.last_error or outcome.name.lower()}")


def drop(
    options: StoreOptions, names: Sequence[str], deadline_s: float
) -> tuple[list[bool], list[bool], str]:
    """Removes values. Returns for each name whether the store had its value, and whether the value is gone. Also
    returns the store's last error, which is the reason if values are left."""
    with opened(options) as store:
        there = [presence is Presence.YES for presence in store.exists(names, deadline_s)]
        gone = store.remove(names, deadline_s)
        return there, gone, store.last_error


JOBS: dict[str, Callable[..., Any]] = {"ping": ping, "bench": bench, "look": look, "drop": drop}
