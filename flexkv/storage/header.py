"""The header of a slab. It identifies the model and unit whose pages the slab holds, and lists the offsets of the parts
of a page. Specified in docs/disk-format.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexkv import c_ext
from flexkv.errors import ConfigError, DiskError, GeometryError
from flexkv.storage.base import DiskGroup
from flexkv.storage.group_tables import (
    WORD_BYTES,
    TableReader,
    codec_of,
    format_text,
    pack_record,
    pack_tables,
    short_text,
    word,
)
from flexkv.storage.private_files import open_at_once
from flexkv.storage.sharing import groups_of_slab, is_plain, slab_numbers

MAGIC = b"FLEXKVSL"
PLAIN_VERSION = 1
"""The header's version if the unit's KV groups are plain (`is_plain`); otherwise it is GROUPS_VERSION."""
GROUPS_VERSION = 2
VERSIONS = (PLAIN_VERSION, GROUPS_VERSION)
SECTOR_BYTES = 4096
MOST_HEADER_BYTES = 64 << 20
"""The longest header that is read, in bytes. No unit needs a longer one, so a larger length field is damage."""

FIXED = struct.Struct("<8sIIQQQQ32s32sIIIIIIII16sHHHH")
"""The start of a header: magic, version, header_bytes, slab_id, slot_bytes, created, digest, fingerprint, format,
group, ranks, layers, runs, block_tokens, page_version, epoch, groups, dtype, and the lengths of format_id, model, unit;
reserved. In version 1 `groups` is 0. In version 2, ranks, layers, runs, block_tokens, dtype and the length of format_id
are 0, because each group's record contains them.
"""

DIGEST_AT = 40


class DamagedHeaderError(DiskError):
    """The bytes in the header's place are not a complete, undamaged header."""


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """A header's fields, without its tables.

    Attributes:
        created: when the slab was created, in Unix seconds.
        format: 32-byte digest of the encoding and geometry of the slab's pages; see `slab_format`.
        group: number of the slab's KV group; if several groups share the slab, number of the first. The fields `ranks`,
            `layers`, `block_tokens`, `dtype` and `format_id` describe this group.
        epoch: epoch of the weights when the slab was created.
    """

    version: int
    slab_id: int
    header_bytes: int
    slot_bytes: int
    created: int
    fingerprint: bytes
    format: bytes
    group: int
    ranks: int
    layers: int
    block_tokens: int
    epoch: int
    dtype: str
    format_id: str
    model: str
    unit: str


def format_digests(groups: Sequence[DiskGroup]) -> list[bytes]:
    """Returns a 32-byte digest for each group. Groups with the same number in two units have the same digest if their
    slot images have the same encoding and geometry. If a unit's groups are not plain (`is_plain`), the slabs, rules,
    reaches and signatures of the two groups must be the same, too.

    Raises:
        GeometryError, ConfigError: see `slab_numbers`.
    """
    slabs = slab_numbers(groups)
    if is_plain(groups):
        texts = [format_text(groups[0], f"{PLAIN_VERSION}.{c_ext.PAGE_VERSION}")]
    else:
        texts = [
            format_text(
                group,
                f"{GROUPS_VERSION}.{c_ext.PAGE_VERSION}",
                (number, slabs[number], group.rule, group.reach, group.signature.hex()),
            )
            for number, group in enumerate(groups)
        ]
    return [hashlib.sha256(text.encode()).digest() for text in texts]


def slab_format(groups: Sequence[DiskGroup], slab: int) -> bytes:
    """Returns the field `format` of a slab's header: a 32-byte digest of the `format_digests` of the slab's groups."""
    digests = format_digests(groups)
    if is_plain(groups):
        return digests[0]
    return hashlib.sha256(b"".join(digests[number] for number in groups_of_slab(groups, slab))).digest()


def slot_bytes(groups: Mapping[int, DiskGroup]) -> int:
    """The size in bytes of a slot in the slab that these groups share: the size of their largest slot image.

    Raises:
        GeometryError: a group's runs do not fill its stripes exactly.
    """
    return max(codec_of(group).image_bytes for group in groups.values())


def slot_bytes_of_all(groups: Sequence[DiskGroup]) -> int:
    """The size in bytes of one slot, summed over the slabs of these groups.

    Raises:
        GeometryError: see `slot_bytes` and `slab_numbers`.
    """
    return sum(slot_bytes(groups_of_slab(groups, slab)) for slab in set(slab_numbers(groups)))


def pack_header(
    groups: Sequence[DiskGroup],
    slab: int,
    slab_id: int,
    created: int,
    epoch: int,
    fingerprint: bytes,
    model: str,
    unit: str,
) -> bytes:
    """Returns a slab's header as bytes, padded to a multiple of 4 KiB.

    Args:
        groups: all groups of the unit.
        slab: number of the first group that uses the slab.

    Raises:
        GeometryError: the fingerprint is not 32 bytes long; see also `slab_numbers`.
        ConfigError: see `slab_numbers`.
    """
    if len(fingerprint) != 32:
        raise GeometryError(f"a fingerprint has 32 bytes, given {len(fingerprint)}")
    own = groups_of_slab(groups, slab)
    name, owner = short_text(model), short_text(unit)
    if is_plain(groups):
        group = groups[slab]
        tables, layers, runs = pack_tables(group)
        of_group = (len(group.stripe_bytes), layers, runs, group.block_tokens)
        count, dtype, format_id = 0, short_text(group.dtype, WORD_BYTES), short_text(group.format_id)
    else:
        tables = b"".join(pack_record(group, number) for number, group in own.items())
        of_group, count, dtype, format_id = (0, 0, 0, 0), len(own), b"", b""
    tables += format_id + name + owner
    header_bytes = -(-(FIXED.size + len(tables)) // SECTOR_BYTES) * SECTOR_BYTES
    fixed = FIXED.pack(
        MAGIC,
        PLAIN_VERSION if is_plain(groups) else GROUPS_VERSION,
        header_bytes,
        slab_id,
        slot_bytes(own),
        created,
        0,
        fingerprint,
        slab_format(groups, slab),
        slab,
        *of_group,
        c_ext.PAGE_VERSION,
        epoch,
        count,
        dtype,
        len(format_id),
        len(name),
        len(owner),
        0,
    )
    raw = bytearray((fixed + tables).ljust(header_bytes, b"\0"))
    struct.pack_into("<Q", raw, DIGEST_AT, c_ext.run_digest(bytes(raw)))
    return bytes(raw)


def read_header(path: str) -> SlabHeader:
    """Reads and verifies the header of the slab at `path`.

    Raises:
        DamagedHeaderError: the header is too short or not a slab's, or its digest does not match.
        DiskError: the header has another version or impossible content, or the file cannot be read.
    """
    return parse_header(raw_header(path), path)[0]


def raw_header(path: str) -> bytes:
    """Returns the bytes at the start of a slab, unverified: as many as the header's length field says, or one sector if
    there is no header or its length field is meaningless. Returns fewer if the file is shorter.

    Raises:
        DiskError: the file cannot be read.
    """
    try:
        with open(path, "rb", opener=open_at_once) as file:
            raw = file.read(SECTOR_BYTES) or b""  # `read` returns None for a pipe that has a writer
            if len(raw) >= FIXED.size and raw[:8] == MAGIC:
                total = struct.unpack_from("<I", raw, 12)[0]
                if SECTOR_BYTES < total <= MOST_HEADER_BYTES:
                    raw += file.read(total - SECTOR_BYTES) or b""
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from error
    return raw


def parse_header(raw: bytes, path: str) -> tuple[SlabHeader, dict[int, DiskGroup]]:
    """Verifies the header in `raw`. Returns the header, and the slab's groups by number, ascending.

    Raises:
        DamagedHeaderError: the header is too short or not a slab's, or its digest does not match.
        DiskError: the header has another version, or impossible content although its digest matches.
    """
    if len(raw) < SECTOR_BYTES:
        raise DamagedHeaderError(f"{path}: no whole slab header ({len(raw)} bytes)")
    magic, version, header_bytes = FIXED.unpack_from(raw)[:3]
    if magic != MAGIC:
        raise DamagedHeaderError(f"{path}: no slab of ours (it starts with {magic!r})")
    if not SECTOR_BYTES <= header_bytes <= len(raw):
        raise DamagedHeaderError(
            f"{path}: damaged slab header: it says {header_bytes} bytes, {len(raw)} are there"
        )
    zeroed = bytearray(raw[:header_bytes])
    (digest,) = struct.unpack_from("<Q", zeroed, DIGEST_AT)
    struct.pack_into("<Q", zeroed, DIGEST_AT, 0)
    if c_ext.run_digest(bytes(zeroed)) != digest:
        raise DamagedHeaderError(f"{path}: damaged slab header")
    page_version = FIXED.unpack_from(raw)[14]
    if version not in VERSIONS or page_version != c_ext.PAGE_VERSION:
        known = " and ".join(f"{known}.{c_ext.PAGE_VERSION}" for known in VERSIONS)
        raise DiskError(f"{path}: slab format {version}.{page_version}; this version reads {known}")
    try:
        return _parse(raw[:header_bytes])
    except (ValueError, GeometryError, ConfigError) as error:
        raise DiskError(f"{path}: a slab header that says what cannot be: {error}") from error


def _parse(raw: bytes) -> tuple[SlabHeader, dict[int, DiskGroup]]:
    """Returns the fields of a header whose digest has matched, and the slab's groups by number.

    Raises:
        ValueError, GeometryError, ConfigError: the header has impossible content.
    """
    fields = FIXED.unpack_from(raw)
    _, version, header_bytes, slab_id, bytes_of_slot, created, _, fingerprint, format_ = fields[:9]
    slab, ranks, layers, runs, block_tokens, _, epoch, count, dtype = fields[9:18]
    name_bytes, model_bytes, unit_bytes = fields[18:21]
    reader = TableReader(raw, FIXED.size)
    if version == PLAIN_VERSION:
        stripe_bytes, tables = reader.tables(ranks, layers, runs)
        text = reader.text(name_bytes)
        groups = {slab: DiskGroup(text, stripe_bytes, tables, block_tokens, word(dtype))}
    else:
        groups = _groups(reader, slab, count)
    first = groups[slab]
    if slot_bytes(groups) != bytes_of_slot:
        raise ValueError(f"slots of {bytes_of_slot} bytes for images of {slot_bytes(groups)}")
    header = SlabHeader(
        version,
        slab_id,
        header_bytes,
        bytes_of_slot,
        created,
        fingerprint,
        format_,
        slab,
        len(first.stripe_bytes),
        first.num_layers,
        first.block_tokens,
        epoch,
        first.dtype,
        first.format_id,
        reader.text(model_bytes),
        reader.text(unit_bytes),
    )
    return header, groups


def _groups(reader: TableReader, slab: int, count: int) -> dict[int, DiskGroup]:
    """Reads the groups of a version 2 header.

    Raises:
        ValueError, ConfigError: the groups' numbers do not ascend from the slab's number, or a rule is unknown.
    """
    groups: dict[int, DiskGroup] = {}
    for _ in range(count):
        number, group = reader.record()
        if number != slab if not groups else number <= max(groups):
            raise ValueError(f"group {number} after {list(groups)} in the slab of group {slab}")
        c_ext.GroupRule(group.rule, group.block_tokens, group.reach)  # raises if the rule is not allowed
        groups[number] = group if number == slab else replace(group, shares=slab)
    if not groups:
        raise ValueError("no group")
    return groups


def read_group(path: str) -> tuple[SlabHeader, DiskGroup]:
    """Returns the header of the slab at `path`, and the slab's first group. Raises what `read_header` raises."""
    header, groups = parse_header(raw_header(path), path)
    return header, groups[header.group]
