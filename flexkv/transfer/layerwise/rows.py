"""Row sources and targets over arrays."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.transfer.layerwise.base import Array, LostRows


class PageRows:
    """Rows that lie in pages, one after the other: those of a chunk, a whole number of pages or a part of the last.

    Args:
        pages: of each page its planes, each [block_tokens, heads, head_width] with any strides. Rows of one array
            [planes, tokens, heads, head_width] are one page.
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
    """Rows that will not come, or cannot be taken."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def copy_to(self, rows: Array) -> None:
        raise LostRows(self._reason)

    def copy_from(self, rows: Array) -> None:
        raise LostRows(self._reason)
