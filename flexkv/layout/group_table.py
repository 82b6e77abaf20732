"""Base class of layout handlers, which holds the views and formats of their KV groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.c_ext import KvView
from flexkv.errors import BlockRangeError
from flexkv.layout.base import LayoutHandler
from flexkv.layout.format_id import FormatId


@dataclass(frozen=True, slots=True)
class GroupLayout:
    view: KvView
    format_id: FormatId


class GroupTable(LayoutHandler):
    """A layout handler whose constructor gets the finished views and formats of all KV groups."""

    def __init__(self, groups: Sequence[GroupLayout]) -> None:
        self._groups = tuple(groups)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def _group(self, group: int) -> GroupLayout:
        if not 0 <= group < len(self._groups):
            raise BlockRangeError(f"KV group {group}: there are groups [0, {len(self._groups)})")
        return self._groups[group]

    def view(self, group: int = 0) -> KvView:
        return self._group(group).view

    def format_id(self, group: int = 0) -> FormatId:
        return self._group(group).format_id
