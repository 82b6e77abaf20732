"""Finds folders with pages that other units of the same model wrote, perhaps for another engine in another encoding. A
unit looks for these folders when it starts, and only reads them. Equal keys identify equal blocks in all of these
folders, because the folders have the same fingerprint, and keys depend on it.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from flexkv import c_ext
from flexkv.errors import DiskError, FlexKVError, GeometryError
from flexkv.layout.conversion import PageEncoding, conversion
from flexkv.layout.format_id import FormatId
from flexkv.storage.base import DiskGroup, DiskIdentity
from flexkv.storage.folder import (
    DIGEST_DIGITS,
    native_path,
    slab_name,
    unit_folder,
)
from flexkv.storage.group_tables import codec_of
from flexkv.storage.header import PLAIN_VERSION, SlabHeader, format_digests
from flexkv.storage.header_copy import find_header
from flexkv.storage.index import SlotIndex
from flexkv.storage.index_copy import copy_index
from flexkv.storage.index_database import INDEX_NAME
from flexkv.storage.index_trouble import UnusableIndexError
from flexkv.storage.scan import SlotReport, read_slots, rows_of
from flexkv.storage.slot_rows import ROW, Rows
from flexkv.storage.weights_name import read_weights

logger = logging.getLogger(__name__)

GROUP = 0
"""The number of the KV group and of its slab. There is only one group, because only units with one KV group read peer
folders.
"""


Rewrites = tuple[c_ext.PageConversion | None, ...]
"""For each rank, the conversion of another unit's stripe to this unit's encoding; None if the encodings are equal."""


@dataclass(frozen=True, slots=True)
class PeerFolder:
    """A slab of another unit, and the pages of one KV group in it.

    Attributes:
        codec: codec of the group's slot images.
        stripes: offset and bytes of each rank's stripe in a slot image.
        rewrites: for each rank, the conversion of its stripe to this unit's encoding; None if the encodings are equal.
        rows: the index's row of each slot at the time when the folder was opened, [slots]; no rows if the index was not
            read.
        epoch: epoch of the pages in `rows`.
        weights: 32-byte digest of the weights with which these pages were computed; empty if they are unknown.
    """

    folder: Path
    slab: c_ext.SlabFile
    header: SlabHeader
    codec: c_ext.PageCodec
    stripes: tuple[tuple[int, int], ...]
    rewrites: Rewrites
    rows: Rows
    epoch: int
    weights: bytes = b""


def open_peer_folders(
    roots: Sequence[Path], identity: DiskIdentity, group: DiskGroup, heads: int
) -> list[PeerFolder]:
    """Opens the other units' slabs under `roots` that have the fingerprint of `identity`. Leaves out slabs without
    pages. Also leaves out, and logs, slabs that cannot be used, for example because their pages cannot be converted
    exactly.

    A folder is locked only while its index is read. Pages that the folder's unit writes later are not found. Pages that
    the unit overwrites later are misses, because every slot's trailer identifies its page.

    Args:
        group: this unit's KV group.
        heads: number of KV heads on one rank; 0 if the group's blocks have no heads.
    """
    fingerprint = identity.fingerprint.hex()[:DIGEST_DIGITS]
    found = []
    for root in roots:
        own = unit_folder(root, identity, [group])
        for path in sorted(root.glob(f"*-{fingerprint}-*/*/{slab_name(GROUP)}")):
            if path.parent == own:
                continue
            try:
                peer = _open(path, identity, group, heads)
            except (FlexKVError, OSError) as error:
                logger.warning("%s: its pages are not used here: %s", path.parent, error)
                continue
            held = int((peer.rows["generation"] != 0).sum())
            logger.info("%s: %d pages of %s can be read here", path.parent, held, peer.header.format_id)
            if held:
                found.append(peer)
    return found


def same_format(theirs: Sequence[DiskGroup], ours: Sequence[DiskGroup]) -> bool:
    """Whether the pages of two units have the same encoding in all groups, and the groups have the same rules.

    Raises:
        GeometryError, ConfigError: see `slab_numbers`.
    """
    return format_digests(theirs) == format_digests(ours) and (
        [group.dtype for group in theirs] == [group.dtype for group in ours]
    )


def rewrites_of(
    theirs: Sequence[DiskGroup], ours: Sequence[DiskGroup], heads: Sequence[int]
) -> list[Rewrites]:
    """Returns, for each KV group, the conversions of the other unit's stripes to this unit's encoding.

    Args:
        heads: per group, the number of KV heads on one rank; 0 if the group's blocks have no heads.

    Raises:
        GeometryError: no exact conversion exists, or the groups' rules differ. The message says why and, if there are
            several groups, for which one.
        ConfigError: see `slab_numbers`.
    """
    if len(theirs) != len(ours):
        raise GeometryError(f"its number of KV groups is {len(theirs)}, ours {len(ours)}")
    if same_format(theirs, ours):
        return [(None,) * len(group.stripe_bytes) for group in ours]
    rewrites = []
    for number, (group, mine) in enumerate(zip(theirs, ours, strict=True)):
        try:
            rewrites.append(_rewrites_of_group(group, mine, heads[number]))
        except GeometryError as error:
            if len(theirs) == 1:
                raise
            raise GeometryError(f"KV group {number}: {error}") from error
    return rewrites


def _rewrites_of_group(theirs: DiskGroup, ours: DiskGroup, heads: int) -> Rewrites:
    if theirs.rule_text != ours.rule_text:
        raise GeometryError(f"a hit needs its pages by the rule {theirs.rule_text}, ours by {ours.rule_text}")
    if theirs.signature != ours.signature:
        raise GeometryError("its layers are others than ours")
    if theirs.block_tokens != ours.block_tokens:
        raise GeometryError(f"its blocks have {theirs.block_tokens} tokens, ours {ours.block_tokens}")
    if len(theirs.stripe_bytes) != len(ours.stripe_bytes):
        raise GeometryError(
            f"its pages have stripes of {len(theirs.stripe_bytes)} ranks, ours of {len(ours.stripe_bytes)}"
        )
    return tuple(
        conversion(_encoding(theirs, rank, heads), _encoding(ours, rank, heads))
        for rank in range(len(ours.runs))
    )


def _encoding(group: DiskGroup, rank: int, heads: int) -> PageEncoding:
    format_id = FormatId.parse(group.format_id)
    return PageEncoding.of_runs(group.runs[rank], group.stripe_bytes[rank], format_id, heads, group.dtype)


def _open(path: Path, identity: DiskIdentity, ours: DiskGroup, heads: int) -> PeerFolder:
    """Opens another unit's slab, and reads the rows of its folder's index.

    Raises:
        DiskError: the folder belongs to another model, is in use, damaged or unreadable, or its KV group is not plain.
        GeometryError: its pages cannot be converted exactly.
    """
    (peer,) = open_slab(path, identity, [ours], [heads])
    if peer.header.version != PLAIN_VERSION:
        raise DiskError("it holds pages of a KV group with a rule or signature of its own")
    rows, epoch = _rows(path.parent, peer.slab, peer.header.slab_id, peer.codec, peer.slab.row[3])
    weights, of_epoch = read_weights(path.parent) or (b"", -1)
    # If the folder's unit has begun a new epoch since `_rows`, the digest is that of the new epoch's weights, not that
    # of the weights with which the pages in `rows` were computed.
    return replace(peer, rows=rows, epoch=epoch, weights=weights if of_epoch == epoch else b"")


def open_slab(
    path: Path, identity: DiskIdentity, ours: Sequence[DiskGroup], heads: Sequence[int]
) -> tuple[PeerFolder, ...]:
    """Opens another unit's slab without reading its index. Returns a PeerFolder for each KV group in the slab.

    Args:
        ours: this unit's KV groups.
        heads: per group, the number of KV heads on one rank; 0 if the group's blocks have no heads.

    Raises:
        DiskError: the slab belongs to another model, is damaged, or unreadable.
        GeometryError: its pages cannot be converted exactly.
    """
    found = find_header(path)
    header = found.header
    if header.fingerprint != identity.fingerprint:
        raise DiskError(f"it holds another model's pages ({header.model!r})")
    theirs = list(found.groups.values())
    rewrites = rewrites_of(theirs, ours, heads)
    slots = (path.stat().st_size - header.header_bytes) // header.slot_bytes
    slab = c_ext.SlabFile(
        native_path(path), header.header_bytes, header.slot_bytes, slots, header.slab_id, read_only=True
    )
    folders = []
    for number, group in enumerate(theirs):
        codec = codec_of(group, number)
        stripes = tuple((codec.stripe_offset(rank), size) for rank, size in enumerate(group.stripe_bytes))
        none = np.zeros(0, ROW)
        folders.append(PeerFolder(path.parent, slab, header, codec, stripes, rewrites[number], none, epoch=0))
    return tuple(folders)


def _rows(
    folder: Path, slab: c_ext.SlabFile, slab_id: int, codec: c_ext.PageCodec, slots: int
) -> tuple[Rows, int]:
    """Returns the rows of the folder's index, and their epoch. If the index is damaged or has another version, makes
    the rows from the slab's trailers; the folder's own unit repairs the index at its next start.

    Raises:
        DiskError: the folder is in use, there is no index, or index and epoch are both damaged.
    """
    with tempfile.TemporaryDirectory(prefix="flexkv-index-") as made:
        written_epoch = copy_index(folder, Path(made))
        try:
            index = SlotIndex(Path(made) / INDEX_NAME, [slots])
        except UnusableIndexError as error:
            logger.warning("%s: %s: its slots are read instead", folder, error)
            if written_epoch is None:
                raise DiskError(
                    f"{error}, and its epoch is damaged or gone; its own unit mends them when it starts"
                ) from error
            return _rows_of_pages(read_slots(slab, slab_id, [codec], slots, data=False), slots, written_epoch)
        try:
            epoch = max(index.epoch, written_epoch or 0)
            if index.epoch < epoch or epoch % 2:
                # Only the process that wrote the pages of an odd epoch knew their weights.
                index.clear()
            index.adopt([slab_id])
            return index.rows[GROUP][:slots].copy(), epoch
        finally:
            index.close()


def _rows_of_pages(reports: Iterator[SlotReport], slots: int, written_epoch: int) -> tuple[Rows, int]:
    rows, epochs = rows_of(reports, slots)
    epoch = max(written_epoch, int(epochs.max(initial=0)))
    rows[(epochs != epoch) | bool(epoch % 2)] = np.zeros((), ROW)
    return rows, epoch
