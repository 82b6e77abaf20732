"""Row sources and targets over arrays."""

from __future__ import annotations

from collections.abc import Sequence

from flexkv.transfer.layerwise.base import Array, LostRows


class PageRows:
    """A chunk's rows, which fill one page after another; the last page may be partly used.

    Args:
        pages: each page's planes, each [block_tokens, heads, head_width] with any strides. One array [planes, tokens,
            heads, head_width] counts as one page.
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
    """The source or target of rows that will not arrive, or cannot be taken."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def copy_to(self, rows: Array) -> None:
        raise LostRows(self._reason)

    def copy_from(self, rows: Array) -> None:
        raise LostRows(self._reason)
