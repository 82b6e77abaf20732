"""Records the events that a manager reports to its listener, until the model checks the call that caused them."""

from __future__ import annotations

from flexkv.cache.base import CacheListener
from flexkv.facts.keys import Keys
from flexkv.simulation.base import Key, require


class Recorder(CacheListener):
    """A listener that records the manager's events until a `take_` method returns them."""

    def __init__(self) -> None:
        self.published: list[Key] = []
        self.evicted: list[Key] = []
        self.expiring: set[Key] = set()
        """Keys of expired pages, which the manager must evict from host memory in its next call."""
        self.resets: list[int] = []

    def on_publish(self, group: int, keys: Keys) -> None:
        self.published += [(group, bytes(key)) for key in keys]

    def on_evict(self, group: int, keys: Keys) -> None:
        self.evicted += [(group, bytes(key)) for key in keys]

    def on_reset(self, epoch: int) -> None:
        self.resets.append(epoch)

    def take_evicted(self) -> list[Key]:
        """Returns the keys that have left host memory since the last call, except those in `expiring`. Checks that all
        keys in `expiring` have left."""
        evicted, self.evicted = self.evicted, []
        expiring, self.expiring = self.expiring, set()
        require(expiring <= set(evicted), "a page is still there although its time is over")
        return [key for key in evicted if key not in expiring]

    def take_published(self) -> list[Key]:
        published, self.published = self.published, []
        return published
