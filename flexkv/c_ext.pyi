"""The native core. One section an area, kept by whoever keeps csrc/bindings/bind_<area>.cpp."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

class Buffer(Protocol):
    """Any object with the C-contiguous buffer protocol (numpy arrays, bytearray, memoryview, mmap)."""

# --- module -------------------------------------------------------------------------------------------------

__variant__: str
"""`cpu` or `cuda`, with `-address` or `-thread` for a sanitizer build."""

def build_info() -> dict[str, bool | str | int]:
    """What this module was built with: cuda, sanitizer, compiler, cpp_standard."""

# --- layout -------------------------------------------------------------------------------------------------

class KvView:
    """Where the runs of every block of one KV group lie in one rank's pool. Holds addresses, not memory.

    `runs`, `segments` and `segments_of_layers` are int64 [n, 5]: base, block_stride, run_bytes, page_offset,
    layer.
    """

    def __init__(
        self, runs: NDArray[np.int64], num_blocks: int, stripe_bytes: int, first_block: int = 0
    ) -> None:
        """Raises GeometryError unless the runs fill the stripe exactly and no two blocks share a byte."""
    @property
    def runs(self) -> NDArray[np.int64]: ...
    @property
    def segments(self) -> NDArray[np.int64]: ...
    def segments_of_layers(self, lo: int, hi: int) -> NDArray[np.int64]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def first_block(self) -> int: ...
    @property
    def stripe_bytes(self) -> int: ...
    def check(self) -> None: ...

class SlotImage:
    """Geometry of a slot image: stripes and trailer, each from a 4 KiB boundary. Offsets and sizes in
    bytes.
    """

    def __init__(self, stripe_bytes: list[int], trailer_bytes: int = 0) -> None: ...
    def stripe_offset(self, rank: int) -> int: ...
    def stripe_bytes(self, rank: int) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def trailer_offset(self) -> int: ...
    @property
    def trailer_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

def gather(view: KvView, block: int, stripe: Buffer) -> None:
    """Copies a block from a host-memory pool to `stripe` (exactly view.stripe_bytes bytes, writable)."""

def scatter(view: KvView, block: int, stripe: Buffer) -> None:
    """Copies `stripe` to a block of a host-memory pool."""

def gather_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of a block; the rest of the stripe is left alone."""

def scatter_layers(view: KvView, lo: int, hi: int, block: int, stripe: Buffer) -> None:
    """Copies layers [lo, hi) of the stripe to a block; the block's other layers are left alone."""

def run_digest(run: Buffer) -> int:
    """The 64-bit digest of a run's bytes (docs/digest.md)."""

def page_digests(view: KvView, stripe: Buffer) -> NDArray[np.uint64]:
    """One digest for each of `view.runs`, of their bytes in `stripe` (exactly view.stripe_bytes bytes)."""
