"""Packs and reads the part of a slab's header that describes one KV group: the tables of its pages and, in version 2, a
record before them. Specified in docs/disk-format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv import c_ext
from flexkv.storage.base import DiskGroup

TEXT_BYTES = 512
"""The maximum length of each text at the end of a header, in bytes. A longer text is cut."""

WORD_BYTES = 16
"""Size in bytes of a field that holds a short text, padded with zeros."""

RECORD = struct.Struct("<IIIIIII16s16sHHI")
"""A group's record: group, ranks, layers, runs, block_tokens, reach, reserved, rule, dtype, the lengths of format_id
and signature, reserved.
"""

STRIPE = np.dtype([("offset", "<u8"), ("bytes", "<u8")])
RUN = np.dtype([("offset", "<u8"), ("bytes", "<u8"), ("layer", "<u4"), ("rank", "<u4")])


def codec_of(group: DiskGroup, number: int = 0) -> c_ext.PageCodec:
    """Returns the codec that writes and verifies the trailers of a group's slot images.

    Args:
        number: number of the KV group, which the trailers contain.

    Raises:
        GeometryError: the runs do not fill the stripes exactly.
    """
    runs = [np.ascontiguousarray(table, np.int64) for table in group.runs]
    return c_ext.PageCodec(list(group.stripe_bytes), runs, group.host_digests, number)


def short_text(text: str, most: int = TEXT_BYTES) -> bytes:
    """Returns `text` in UTF-8. If that is longer than `most` bytes, it is cut between two characters."""
    return text.encode()[:most].decode(errors="ignore").encode()


def pack_tables(group: DiskGroup) -> tuple[bytes, int, int]:
    """Returns the tables of stripes, layer offsets and runs as bytes, and the numbers of layers and runs."""
    codec = codec_of(group)
    ranks = len(group.stripe_bytes)
    stripes = np.array([(codec.stripe_offset(r), group.stripe_bytes[r]) for r in range(ranks)], STRIPE)
    runs = np.concatenate(
        [
            np.array([(codec.stripe_offset(r) + o, n, layer, r) for o, n, layer in table.tolist()], RUN)
            for r, table in enumerate(group.runs)
        ]
    )
    first = runs[runs["rank"] == 0]
    layers = np.zeros(codec.layers, "<u8")
    for layer in range(codec.layers):
        of_layer = first[first["layer"] == layer]["offset"]
        layers[layer] = of_layer.min() if len(of_layer) else 0
    return stripes.tobytes() + layers.tobytes() + runs.tobytes(), codec.layers, len(runs)


class TableReader:
    """Reads the tables and texts of a slab's header, one after the other.

    Raises:
        ValueError: (every method) the header ends too early, or the bytes of a text are not UTF-8.
    """

    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self._at = at

    def bytes(self, count: int) -> bytes:
        taken = self._raw[self._at : self._at + count]
        if len(taken) != count:
            raise ValueError(f"{count} bytes at {self._at} of {len(self._raw)}")
        self._at += count
        return taken

    def text(self, count: int) -> str:
        return self.bytes(count).decode()

    def tables(
        self, ranks: int, layers: int, runs: int
    ) -> tuple[tuple[int, ...], tuple[NDArray[np.int64], ...]]:
        """Reads the tables. Returns the size in bytes of each rank's stripe, and each rank's RunTable."""
        stripes = np.frombuffer(self.bytes(ranks * STRIPE.itemsize), STRIPE)
        self.bytes(8 * layers)
        table = np.frombuffer(self.bytes(runs * RUN.itemsize), RUN)
        of_ranks = []
        for rank in range(ranks):
            rows = table[table["rank"] == rank]
            offsets = rows["offset"].astype(np.int64) - int(stripes["offset"][rank])
            of_ranks.append(
                np.stack([offsets, rows["bytes"].astype(np.int64), rows["layer"].astype(np.int64)], 1)
            )
        return tuple(int(n) for n in stripes["bytes"]), tuple(of_ranks)

    def record(self) -> tuple[int, DiskGroup]:
        """Reads the record of a group in a version 2 header. Returns the group's number and the group."""
        fields = RECORD.unpack(self.bytes(RECORD.size))
        number, ranks, layers, runs, block_tokens, reach, _, rule, dtype, name_bytes, signature_bytes, _ = (
            fields
        )
        stripe_bytes, tables = self.tables(ranks, layers, runs)
        format_id, signature = self.text(name_bytes), self.bytes(signature_bytes)
        return number, DiskGroup(
            format_id,
            stripe_bytes,
            tables,
            block_tokens,
            word(dtype),
            rule=word(rule),
            reach=reach,
            signature=signature,
        )


def word(field: bytes) -> str:
    """The text in a padded field. Raises ValueError if it is not UTF-8."""
    return field.rstrip(b"\0").decode()


def pack_record(group: DiskGroup, number: int) -> bytes:
    """A group's record in a version 2 header, followed by its tables and texts."""
    tables, layers, runs = pack_tables(group)
    format_id = short_text(group.format_id)
    record = RECORD.pack(
        number,
        len(group.stripe_bytes),
        layers,
        runs,
        group.block_tokens,
        group.reach,
        0,
        short_text(group.rule, WORD_BYTES),
        short_text(group.dtype, WORD_BYTES),
        len(format_id),
        len(group.signature),
        0,
    )
    return record + tables + format_id + group.signature


def format_text(group: DiskGroup, version: str, more: Sequence[object] = ()) -> str:
    """Returns a text that is equal for two groups if their slot images have the same encoding and geometry, and
    `version` and `more` are equal.

    Args:
        more: further values that the text contains.
    """
    parts = [";".join(map(str, (version, group.format_id, group.block_tokens, group.stripe_bytes, *more)))]
    return "|".join([*parts, *(f"{table.tolist()}" for table in group.runs)])
