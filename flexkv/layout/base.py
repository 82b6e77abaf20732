"""The contract of the layout handlers: an engine's pool in, views and format ids out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from flexkv.c_ext import KvView
from flexkv.layout.format_id import FormatId


class LayoutHandler(ABC):
    """Lowers one rank's KV pool to one view per KV group.

    A handler's constructor checks all of its geometry and raises GeometryError. A handler holds only addresses, so the
    engine's tensors must outlive every use of the views. It imports neither an engine nor torch.
    """

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """KV groups, numbered from 0."""

    @abstractmethod
    def view(self, group: int = 0) -> KvView:
        """The view of a group. Raises BlockRangeError for a group that does not exist."""

    @abstractmethod
    def format_id(self, group: int = 0) -> FormatId:
        """The encoding of this group's pages."""
