"""How a peer's pages become this unit's, for each KV group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv import c_ext
from flexkv.errors import DiskError
from flexkv.storage.base import DiskGroup
from flexkv.storage.group_tables import codec_of
from flexkv.storage.peer_folders import Rewrites, rewrites_of, same_format

DIGEST_BYTES = 8

Pieces = list[tuple[int, int, int]]
"""Offset in the peer's slot, offset in ours, bytes."""

Runs = list[tuple[int, int, int, int]]
"""Offset in our slot, bytes, offset of the digest in the peer's slot and in ours; -1 for none."""


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """How pages of one KV group of one peer become pages of this unit.

    Attributes:
        codec: the peer's.
        digests: whether the peer's slots have run digests.
    """

    group: DiskGroup
    codec: c_ext.PageCodec
    rewrites: Rewrites
    digests: bool


@dataclass(frozen=True, slots=True)
class PeerFormats:
    """How one peer's pages become this unit's: copied as they are, or rewritten.

    Attributes:
        plain: copied as they are, as pieces and runs for `PeerDirectory.add`, by group. Without pieces the pages have
            another format.
        others: how pages of another format are rewritten, by group; empty if they have the same one.
    """

    plain: tuple[tuple[Pieces, Runs], ...]
    others: tuple[OtherFormat, ...]


class UnitPages:
    """The pages of this unit's KV groups.

    Args:
        heads: heads of K and V on one rank, per group; 0 if there are none.
        rewrites: pages of other formats are rewritten, which only keys without an engine's own names allow.
    """

    def __init__(self, groups: Sequence[DiskGroup], heads: Sequence[int], rewrites: bool) -> None:
        self.groups, self.heads = tuple(groups), tuple(heads)
        self._rewrites = rewrites

    def formats_of(self, theirs: Sequence[DiskGroup]) -> PeerFormats:
        """
        Raises:
            GeometryError, ConfigError: no unit has such pages, or see `rewrites_of`.
            DiskError: the pages have another format, and `rewrites` is false.
        """
        # This check is first, because it refuses runs that no page has.
        codecs = [codec_of(group, number) for number, group in enumerate(theirs)]
        rewrites = rewrites_of(theirs, self.groups, self.heads)
        if same_format(theirs, self.groups):
            plain = [
                self._pieces(number, group, codec)
                for number, (group, codec) in enumerate(zip(theirs, codecs, strict=True))
            ]
            return PeerFormats(tuple(plain), ())
        if not self._rewrites:
            raise DiskError("its pages have another format, and keys.scheme is not common")
        others = [
            OtherFormat(group, codec, how, group.host_digests)
            for group, codec, how in zip(theirs, codecs, rewrites, strict=True)
        ]
        return PeerFormats(tuple(([], []) for _ in theirs), tuple(others))

    def _pieces(self, number: int, group: DiskGroup, theirs: c_ext.PageCodec) -> tuple[Pieces, Runs]:
        """The stripes that hold the same bytes, and the runs that have a digest on both sides."""
        mine = self.groups[number]
        ours = codec_of(mine, number)
        pieces: Pieces = []
        runs: Runs = []
        for rank, size in enumerate(group.stripe_bytes):
            start = ours.stripe_offset(rank)
            pieces.append((theirs.stripe_offset(rank), start, size))
            if not group.host_digests and not mine.host_digests:
                continue
            for run, (at, length, _) in enumerate(group.runs[rank].tolist()):
                kept = theirs.digest_offset(rank) + DIGEST_BYTES * run if group.host_digests else -1
                made = ours.digest_offset(rank) + DIGEST_BYTES * run if mine.host_digests else -1
                runs.append((start + at, length, kept, made))
        return pieces, runs
