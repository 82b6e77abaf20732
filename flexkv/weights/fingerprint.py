"""Computes a fingerprint of weights from samples of their content. The fingerprint is computed fast enough for every
start of an engine, but it does not detect changes outside the samples.

The fingerprint goes into keys and folder names. Folders and stores also use the digest of all content
(`flexkv.weights.check`), which detects the changes that samples miss.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flexkv.errors import ConfigError
from flexkv.observe import name_this_thread
from flexkv.weights.files import weight_files

SAMPLE_BYTES = 4096

SMALL_BYTES = 64 << 10
"""Tensors up to this size are read completely. These are norms, biases and scales. Fine-tuning may change only such
tensors.
"""

GAP_BYTES = SAMPLE_BYTES
"""Small tensors with at most this many bytes between them are read with one call."""

MOST_RUN_BYTES = 256 << 10
"""Maximum number of bytes of neighbouring small tensors that one call reads."""

EVEN_SAMPLES = 64
"""The approximate number of samples that are read from a file in a format other than safetensors. The positions of the
tensors in such a file are not known.
"""

MOST_READS, LEAST_READS, ALL_READS = 1024, 64, 16_384
"""Limits of the number of reads: the maximum and the minimum per file, and the maximum for all files together. For
example, a hundred files share 16,384 reads, 163 each. An NVMe drive that takes 100 us per read and serves 16 reads at
once needs a tenth of a second for them.
"""

MOST_SMALL_BYTES, LEAST_SMALL_BYTES, ALL_SMALL_BYTES = 16 << 20, 1 << 20, 256 << 20
"""Limits of the bytes of small tensors that are read: the maximum and the minimum per file, and the maximum for all
files together.
"""

MOST_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, in bytes; this is the format's own limit."""

READERS = 16

Chosen = TypeVar("Chosen")


@dataclass(frozen=True, slots=True)
class SampledRun:
    """The range of bytes [start, end) of a file."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for reading one file, without its header.

    Attributes:
        reads: maximum number of reads of the file.
        small_bytes: maximum number of bytes of small tensors that are read.
    """

    reads: int
    small_bytes: int

    @classmethod
    def of_files(cls, files: int) -> Budget:
        """Returns the budget of one file if `files` files share the limits for all files."""
        return cls(
            max(LEAST_READS, min(MOST_READS, ALL_READS // files)),
            max(LEAST_SMALL_BYTES, min(MOST_SMALL_BYTES, ALL_SMALL_BYTES // files)),
        )


def sampled_identity(path: Path) -> str:
    """Returns a text with a digest of samples of the weights in a file or folder, and of the files' names and sizes.

    The samples of a safetensors file are its header and, as far as the file's budget allows, every tensor of up to
    64 KiB and 4 KiB of every larger tensor. The samples of any other file are about 64 pieces of 4 KiB, spread evenly.

    Raises:
        ConfigError: the folder holds no weights of a known format, or a file, which the message names, is damaged or
            cannot be read.
    """
    try:
        files = weight_files(path)
    except OSError as error:
        raise ConfigError(f"{path}: its weights cannot be read: {error.strerror}") from error
    budget = Budget.of_files(len(files))
    digest = hashlib.sha256()
    with ThreadPoolExecutor(READERS, initializer=name_this_thread, initargs=("flexkv-samples",)) as readers:
        for of_file in readers.map(lambda file: _sample_file(file, budget), files):
            digest.update(of_file)
    return f"sampled:{digest.hexdigest()}"


def _sample_file(file: Path, budget: Budget) -> bytes:
    try:
        with file.open("rb") as content:
            descriptor = content.fileno()
            size = os.fstat(descriptor).st_size
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            digest = hashlib.sha256(f"{file.name}\0{size}\0".encode())
            if file.name.endswith(".safetensors"):
                head = _read_header(file, descriptor, size)
                digest.update(head)
                runs = tensor_runs(_tensors(file, head, size), budget)
            else:
                runs = even_runs(size)
            for run in runs:
                digest.update(_read(file, descriptor, len(run), run.start))
    except OSError as error:
        raise ConfigError(f"weights file {file} cannot be read: {error.strerror}") from error
    return digest.digest()


def even_runs(size: int) -> list[SampledRun]:
    """Returns samples spread evenly over a file of `size` bytes, and one sample at its end."""
    step = max(SAMPLE_BYTES, size // EVEN_SAMPLES)
    runs = [SampledRun(start, min(start + SAMPLE_BYTES, size)) for start in range(0, size, step)]
    return [*runs, SampledRun(max(0, size - SAMPLE_BYTES), size)]


def tensor_runs(tensors: Sequence[tuple[str, SampledRun]], budget: Budget) -> list[SampledRun]:
    """Returns the ranges of bytes to read from a file: each small tensor completely, and one sample of each larger
    tensor, at an offset that depends on the tensor's name. If the budget does not suffice for all tensors, evenly
    chosen ranges of each kind are read.

    Args:
        tensors: name and range of each tensor in the file.
    """
    small = _together(
        sorted((run for _, run in tensors if len(run) <= SMALL_BYTES), key=lambda run: run.start)
    )
    large = [_sample_of(name, run) for name, run in tensors if len(run) > SMALL_BYTES]
    small = _spread(small, budget.reads - min(len(large), budget.reads // 2))
    while sum(map(len, small)) > budget.small_bytes:
        small = _spread(small, len(small) // 2)
    return small + _spread(large, budget.reads - len(small))


def _together(runs: Sequence[SampledRun]) -> list[SampledRun]:
    """Returns the ranges with neighbours joined (see GAP_BYTES and MOST_RUN_BYTES). `runs` must be sorted by their
    start.
    """
    joined: list[SampledRun] = []
    for run in runs:
        if (
            joined
            and run.start - joined[-1].end <= GAP_BYTES
            and run.end - joined[-1].start <= MOST_RUN_BYTES
        ):
            joined[-1] = SampledRun(joined[-1].start, max(joined[-1].end, run.end))
        else:
            joined.append(run)
    return joined


def _sample_of(name: str, run: SampledRun) -> SampledRun:
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    start = run.start + place % (len(run) - SAMPLE_BYTES)
    return SampledRun(start, start + SAMPLE_BYTES)


def _spread(items: Sequence[Chosen], most: int) -> list[Chosen]:
    """Returns at most `most` of the items, chosen at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[number * len(items) // most] for number in range(most)]


def _read_header(file: Path, descriptor: int, size: int) -> bytes:
    """Returns the length field and header of a safetensors file.

    Raises:
        ConfigError: the file is not a complete safetensors file.
    """
    head = os.pread(descriptor, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 0 < length <= min(MOST_HEADER_BYTES, size - 8):
        raise _damaged(file, f"a header of {length} bytes in a file of {size}")
    return head + _read(file, descriptor, length, 8)


def _read(file: Path, descriptor: int, length: int, at: int) -> bytes:
    """Reads `length` bytes of a file from byte `at` on.

    Raises:
        ConfigError: the file has too few bytes: it was cut after its size had been read.
    """
    found = os.pread(descriptor, length, at)
    if len(found) != length:
        raise ConfigError(
            f"weights file {file} has {len(found)} of {length} bytes from byte {at} on: it is being changed"
        )
    return found


def _tensors(file: Path, head: bytes, size: int) -> list[tuple[str, SampledRun]]:
    """Returns name and range of bytes of every tensor in a safetensors file.

    Raises:
        ConfigError: the header is malformed, or a tensor's offsets are impossible.
    """
    try:
        entries: Any = json.loads(head[8:])
    except ValueError as error:
        raise _damaged(file, f"its header is no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _damaged(file, "its header is no table of tensors")
    tensors = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        match offsets:
            case [int(start), int(end)] if 0 <= start <= end <= size - len(head):
                tensors.append((name, SampledRun(len(head) + start, len(head) + end)))
            case _:
                raise _damaged(file, f"tensor {name!r:.80} has the offsets {offsets!r:.80}")
    return tensors


def _damaged(file: Path, what: str) -> ConfigError:
    return ConfigError(f"weights file {file} is no whole safetensors file: {what}")
