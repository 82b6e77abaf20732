"""The interface of the layout handlers, which make views and format ids from an engine's pool."""

from __future__ import annotations

from abc import ABC, abstractmethod

from flexkv.c_ext import KvView
from flexkv.layout.format_id import FormatId


class LayoutHandler(ABC):
    """Translates one rank's KV pool into one view per KV group.

    A handler's constructor checks the pool's geometry, and raises GeometryError if it is not supported. A handler holds
    only addresses, so the engine's tensors must outlive every use of the views. Handlers import neither an engine nor
    torch.
    """

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """Number of KV groups. Groups are numbered from 0."""

    @abstractmethod
    def view(self, group: int = 0) -> KvView:
        """Returns the view of a group. Raises BlockRangeError if the group does not exist."""

    @abstractmethod
    def format_id(self, group: int = 0) -> FormatId:
        """Returns the encoding of the group's pages. Raises BlockRangeError if the group does not exist."""
