"""Keeps a manager's reports to its listener until the model has judged the call."""

from __future__ import annotations

from flexkv.cache.base import CacheListener
from flexkv.facts.keys import Keys
from flexkv.simulation.base import Key


class Recorder(CacheListener):
    """Collects the manager's reports to its listener during one call."""

    def __init__(self) -> None:
        self.published: list[Key] = []
        self.evicted: list[Key] = []
        self.resets: list[int] = []

    def on_publish(self, group: int, keys: Keys) -> None:
        self.published += [(group, bytes(key)) for key in keys]

    def on_evict(self, group: int, keys: Keys) -> None:
        self.evicted += [(group, bytes(key)) for key in keys]

    def on_reset(self, epoch: int) -> None:
        self.resets.append(epoch)

    def take_evicted(self) -> list[Key]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def take_published(self) -> list[Key]:
        published, self.published = self.published, []
        return published
