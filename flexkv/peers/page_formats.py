"""Decides for each KV group how a peer's pages become this unit's pages: whether they are copied as they are, or
converted.
"""

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
"""Stripes to copy, each as (offset in the peer's slot, offset in this unit's slot, bytes)."""

Runs = list[tuple[int, int, int, int]]
"""Runs with digests, each as (offset in this unit's slot, bytes, offset of the digest in the peer's slot, offset of the
digest in this unit's slot). A digest's offset is -1 if the slot has no digests.
"""


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """How a peer's pages of one KV group are converted to this unit's format.

    Attributes:
        codec: codec of the peer's pages.
        rewrites: for each rank, the conversion of its stripe to this unit's encoding; None if the encodings are equal.
        digests: whether the peer's slots contain run digests.
    """

    group: DiskGroup
    codec: c_ext.PageCodec
    rewrites: Rewrites
    digests: bool


@dataclass(frozen=True, slots=True)
class PeerFormats:
    """How one peer's pages become this unit's pages: copied as they are, or converted.

    Attributes:
        plain: for each KV group, the pieces and runs of a page that is copied as it is, for `PeerDirectory.add`. If the
            pages have another format, both are empty.
        others: for each KV group, how pages of another format are converted; empty if the format is the same.
    """

    plain: tuple[tuple[Pieces, Runs], ...]
    others: tuple[OtherFormat, ...]


class UnitPages:
    """The KV groups of this unit. Checks which peers' pages the unit can use.

    Args:
        groups: this unit's KV groups.
        heads: for each group, the number of K and V heads on one rank; 0 if the group's cache does not consist of such
            heads.
        rewrites: whether pages of other formats are converted. Only common keys (`keys.scheme`) allow that, because an
            engine's own keys mean nothing to other engines.
    """

    def __init__(self, groups: Sequence[DiskGroup], heads: Sequence[int], rewrites: bool) -> None:
        self.groups, self.heads = tuple(groups), tuple(heads)
        self._rewrites = rewrites

    def formats_of(self, theirs: Sequence[DiskGroup]) -> PeerFormats:
        """Returns how a peer's pages become this unit's pages.

        Raises:
            GeometryError, ConfigError: the peer's groups have impossible values, or `rewrites_of` cannot convert their
                pages.
            DiskError: the peer's pages have another format, and `rewrites` is false.
        """
        # `codec_of` is called before `rewrites_of`, because `codec_of` refuses runs that no page can have.
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
        """Returns the stripes to copy, and the runs that have a digest in the peer's slots, in this unit's slots or in
        both.
        """
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
