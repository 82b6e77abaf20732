"""The pages of all siblings as one index sees them: to be looked up and read, and never written."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.errors import BlockRangeError, ContractError
from flexkv.observe import unix_now_s
from flexkv.storage.base import Generations, IndexRows, Places, StoredPages
from flexkv.storage.rows import index_rows
from flexkv.storage.siblings import GROUP, Sibling


class SiblingPages(StoredPages):
    """Siblings stand where a tier has disks: place p is slot `p // disks` of sibling `p % disks`.

    Its epoch begins with 0, whatever the siblings' own are: `SiblingReader` asks for those.

    Args:
        siblings: at least one.
    """

    def __init__(self, siblings: Sequence[Sibling]) -> None:
        if not siblings:
            raise ContractError("SiblingPages needs a sibling")
        self._slots = max(len(sibling.rows) for sibling in siblings)
        self._rows = [sibling.rows for sibling in siblings]
        self._disks = len(siblings)
        self._epoch = 0

    @property
    def disks(self) -> int:
        return self._disks

    @property
    def alive(self) -> tuple[bool, ...]:
        return (True,) * self._disks

    def slots(self, group: int) -> int:
        if group != GROUP:
            raise BlockRangeError(f"group {group}: siblings have group {GROUP}")
        return self._slots * self._disks

    def rows(self, group: int) -> IndexRows:
        found, self._rows = self._rows, []
        return index_rows(found, unix_now_s())

    @property
    def epoch(self) -> int:
        return self._epoch

    def record_evict(self, group: int, places: Places, generations: Generations) -> None:
        """They are forgotten in this process; the folder is its own unit's."""

    def record_use(self, group: int, places: Places) -> None:
        """What is used here does not count there."""

    def reset(self, epoch: int, deadline_s: float = 30.0) -> None:
        if epoch <= self._epoch:
            raise ContractError(f"reset to epoch {epoch}: the current one is {self._epoch}")
        self._epoch = epoch
