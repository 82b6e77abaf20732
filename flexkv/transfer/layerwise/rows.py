"""Row sources and targets that are arrays in memory."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.transfer.layerwise.base import Array, LostRows


class PageRows:
    """The source or target of a chunk whose rows lie in consecutive pages; the chunk may end within the last page.

    Args:
        pages: for each page its planes, each of shape [block_tokens, heads, head_width] with any strides. A page may
            also be one array [planes, tokens, heads, head_width].
    """

    def __init__(self, pages: Sequence[Array]) -> None:
        self._pages = pages

    def copy_to(self, rows: Array) -> None:
        at, tokens = 0, int(rows.shape[1])
        for planes in self._pages:
            end = min(at + int(planes[0].shape[0]), tokens)
            for number, plane in enumerate(planes):
                rows[number, at:end] = plane[: end - at]
            at = end

    def copy_from(self, rows: Array) -> None:
        at, tokens = 0, int(rows.shape[1])
        for planes in self._pages:
            end = min(at + int(planes[0].shape[0]), tokens)
            for number, plane in enumerate(planes):
                plane[: end - at] = rows[number, at:end]
            at = end


class NoRows:
    """The source of rows that cannot be delivered, or the target of rows that cannot be taken."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def copy_to(self, rows: Array) -> None:
        raise LostRows(self._reason)

    def copy_from(self, rows: Array) -> None:
        raise LostRows(self._reason)
