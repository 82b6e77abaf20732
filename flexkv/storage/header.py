"""The header of a slab: whose pages it holds and where their parts lie. Specified in docs/disk-format.md."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass

import numpy as np

from flexkv import c_ext
from flexkv.errors import DiskError, GeometryError
from flexkv.storage.base import DiskGroup

MAGIC = b"FLEXKVSL"
VERSION = 1
SECTOR_BYTES = 4096
MOST_HEADER_BYTES = 64 << 20
"""A longer one is a wrong number, bytes."""

FIXED = struct.Struct("<8sIIQQQQ32s32sIIIIIIII16sHHHH")
"""magic, version, header_bytes, slab_id, slot_bytes, created, digest, fingerprint, format, group, ranks, layers, runs,
block_tokens, page_version, epoch, reserved, dtype, and the lengths of format_id, model, unit; reserved."""

DIGEST_AT = 40
DTYPE_FIELD_BYTES = 16
TEXT_BYTES = 512
"""Of each text at most."""

STRIPE = np.dtype([("offset", "<u8"), ("bytes", "<u8")])
RUN = np.dtype([("offset", "<u8"), ("bytes", "<u8"), ("layer", "<u4"), ("rank", "<u4")])


class DamagedHeaderError(DiskError):
    """The header's bytes are not what was written."""


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """What a header says, its tables aside.

    Attributes:
        created: unix seconds.
        epoch: of the weights when the slab was made.
        format: digest of the group's geometry, see `format_digest`.
    """

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


def codec_of(group: DiskGroup) -> c_ext.PageCodec:
    """Raises: GeometryError: the runs do not fill the stripes."""
    runs = [np.ascontiguousarray(table, np.int64) for table in group.runs]
    return c_ext.PageCodec(list(group.stripe_bytes), runs, group.host_digests)


def format_digest(group: DiskGroup) -> bytes:
    """32 bytes that are equal for groups whose slot images can be read as one another's."""
    parts = [f"{VERSION}.{c_ext.PAGE_VERSION};{group.format_id};{group.block_tokens};{group.stripe_bytes}"]
    parts += [f"{table.tolist()}" for table in group.runs]
    return hashlib.sha256("|".join(parts).encode()).digest()


def _text(text: str, most: int = TEXT_BYTES) -> bytes:
    return text.encode()[:most].decode(errors="ignore").encode()


def pack_header(
    group: DiskGroup,
    number: int,
    slab_id: int,
    created: int,
    epoch: int,
    fingerprint: bytes,
    model: str,
    unit: str,
) -> bytes:
    """The header's bytes, a multiple of 4 KiB.

    Raises:
        GeometryError: the fingerprint has another length than 32.
    """
    if len(fingerprint) != 32:
        raise GeometryError(f"a fingerprint has 32 bytes, given {len(fingerprint)}")
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
    format_id, name, owner = _text(group.format_id), _text(model), _text(unit)
    tables = stripes.tobytes() + layers.tobytes() + runs.tobytes() + format_id + name + owner
    header_bytes = -(-(FIXED.size + len(tables)) // SECTOR_BYTES) * SECTOR_BYTES
    fixed = FIXED.pack(
        MAGIC,
        VERSION,
        header_bytes,
        slab_id,
        codec.image_bytes,
        created,
        0,
        fingerprint,
        format_digest(group),
        number,
        ranks,
        codec.layers,
        len(runs),
        group.block_tokens,
        c_ext.PAGE_VERSION,
        epoch,
        0,
        _text(group.dtype, DTYPE_FIELD_BYTES),
        len(format_id),
        len(name),
        len(owner),
        0,
    )
    raw = bytearray((fixed + tables).ljust(header_bytes, b"\0"))
    struct.pack_into("<Q", raw, DIGEST_AT, c_ext.run_digest(bytes(raw)))
    return bytes(raw)


def read_header(path: str) -> SlabHeader:
    """The header of the slab at `path`, verified.

    Raises:
        DamagedHeaderError: it is short, or its digest does not match.
        DiskError: no slab, another version, or it cannot be read.
    """
    return parse_header(raw_header(path), path)[0]


def _open_at_once(path: str, flags: int) -> int:
    """Also where somebody put a pipe, which would else wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def raw_header(path: str) -> bytes:
    """What lies where a header is expected: as much as it names, or a sector. Nothing is verified.

    Raises:
        DiskError: it cannot be read.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            raw = file.read(SECTOR_BYTES) or b""  # None of a pipe that has a writer
            if len(raw) >= FIXED.size and raw[:8] == MAGIC:
                total = struct.unpack_from("<I", raw, 12)[0]
                if SECTOR_BYTES < total <= MOST_HEADER_BYTES:
                    raw += file.read(total - SECTOR_BYTES) or b""
    except OSError as error:
        raise DiskError(f"{path}: {error.strerror}") from error
    return raw


def parse_header(raw: bytes, path: str) -> tuple[SlabHeader, DiskGroup]:
    """What a header says, and the group it describes; raises as `read_header`."""
    if len(raw) < SECTOR_BYTES:
        raise DamagedHeaderError(f"{path}: no whole slab header ({len(raw)} bytes)")
    fields = FIXED.unpack_from(raw)
    magic, version, header_bytes, slab_id, slot_bytes, created, digest, fingerprint, format_ = fields[:9]
    number, ranks, layers, runs, block_tokens, page_version, epoch, _, dtype = fields[9:18]
    lengths = fields[18:21]
    if magic != MAGIC:
        raise DamagedHeaderError(f"{path}: no slab of ours (it starts with {magic!r})")
    if not SECTOR_BYTES <= header_bytes <= len(raw):
        raise DamagedHeaderError(
            f"{path}: damaged slab header: it says {header_bytes} bytes, {len(raw)} are there"
        )
    zeroed = bytearray(raw[:header_bytes])
    struct.pack_into("<Q", zeroed, DIGEST_AT, 0)
    if c_ext.run_digest(bytes(zeroed)) != digest:
        raise DamagedHeaderError(f"{path}: damaged slab header")
    if version != VERSION or page_version != c_ext.PAGE_VERSION:
        raise DiskError(
            f"{path}: slab format {version}.{page_version}; this version reads {VERSION}.{c_ext.PAGE_VERSION}"
        )
    at = FIXED.size
    stripes = np.frombuffer(raw, STRIPE, ranks, at)
    at += stripes.nbytes + 8 * layers
    table = np.frombuffer(raw, RUN, runs, at)
    at += table.nbytes
    texts = []
    for length in lengths:
        texts.append(raw[at : at + length].decode())
        at += length
    of_ranks = []
    for rank in range(ranks):
        rows = table[table["rank"] == rank]
        offsets = rows["offset"].astype(np.int64) - int(stripes["offset"][rank])
        of_ranks.append(
            np.stack([offsets, rows["bytes"].astype(np.int64), rows["layer"].astype(np.int64)], 1)
        )
    header = SlabHeader(
        slab_id,
        header_bytes,
        slot_bytes,
        created,
        fingerprint,
        format_,
        number,
        ranks,
        layers,
        block_tokens,
        epoch,
        dtype.rstrip(b"\0").decode(),
        *texts,
    )
    group = DiskGroup(
        header.format_id,
        tuple(int(n) for n in stripes["bytes"]),
        tuple(of_ranks),
        block_tokens,
        header.dtype,
    )
    return header, group


def read_group(path: str) -> tuple[SlabHeader, DiskGroup]:
    """Header and geometry of the slab at `path`; raises as `read_header`."""
    return parse_header(raw_header(path), path)
