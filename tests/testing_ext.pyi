"""Parts of the native core for tests only: decorators with faults and counts, a GPU's threads run on the CPU, and a
FAKE GPU.

Built in place beside the native core, from csrc/testing/.
"""

from collections.abc import Callable

from flexkv.c_ext import Lane, PageMover, QueueWrapper

class CountingMover(PageMover):
    """Counts what `inner` moves."""

    def __init__(self, inner: PageMover) -> None: ...
    def count(self, kind: int) -> tuple[int, int, int, float]:
        """moves that ended OK (layerwise: one per page and layer), failed ones, bytes of the OK ones, busy seconds."""

class FaultRule:
    """What a FaultyMover does to calls that meet every given condition. Actions: 0 fail with `reason`, 1 delay by
    `delay_s`, 2 stall until `release()`, 3 corrupt the first `corrupt_bytes` (0: all) that arrived. `nth_op` counts
    ops (of `kind` if given) from 0 as the mover first sees them; `times` bounds how often it acts (-1: always).
    """

    def __init__(
        self,
        action: int,
        *,
        kind: int | None = None,
        nth_op: int | None = None,
        page: int | None = None,
        layer: int | None = None,
        block: int | None = None,
        slot: int | None = None,
        reason: str = "injected fault",
        delay_s: float = 0.0,
        corrupt_bytes: int = 0,
        times: int = -1,
    ) -> None: ...

class FaultyMover(PageMover):
    """Injects faults around `inner`: the first rule that matches a call acts."""

    def __init__(self, inner: PageMover, rules: list[FaultRule]) -> None: ...
    def release(self) -> None:
        """Lets stalled calls go on and disables stall rules."""
    def wait_stalled(self, count: int, deadline_s: float) -> bool: ...
    @property
    def calls(self) -> int: ...
    @property
    def acted(self) -> int: ...
    @property
    def stalled(self) -> int: ...

class IoFaultRule:
    """What happens to I/Os that meet every given condition. Actions: 0 end with `error`, 1 move only `bytes`, 2 flip a
    bit of byte `bytes` of what moved, 3 hang until `IoFaults.release`.
    """

    def __init__(
        self,
        action: int,
        *,
        write: bool | None = None,
        disk: int | None = None,
        nth: int | None = None,
        offset: int | None = None,
        error: int = 5,
        bytes: int = 0,
        times: int = -1,
    ) -> None: ...

class IoFaults(QueueWrapper):
    """Faults of a DiskLane's I/O."""

    def __init__(self, rules: list[IoFaultRule]) -> None: ...
    def add(self, rule: IoFaultRule) -> None: ...
    def release(self) -> None:
        """Takes all rules away and lets what hangs go on."""
    def wait_stalled(self, count: int, deadline_s: float) -> bool: ...
    @property
    def acted(self) -> int: ...

def rotate_rows(
    src: object,
    dst: object,
    src_offsets: object,
    dst_offsets: object,
    turn_of_row: object,
    turns: object,
    *,
    dtype: str,
    pairing: str,
    heads: int,
    head_dim: int,
    rotary_dim: int,
    src_head_stride: int,
    dst_head_stride: int,
) -> None:
    """Does what `flexkv.c_ext.rotate_rows` does, in host memory, with the GPU's function: one lane after the other."""

def cuda_layouts() -> dict[str, dict[str, tuple[int, int]]]:
    """Structures that are passed to the CUDA driver and to cuFile: offset and size of each field in bytes; the whole
    structure under "".
    """

def cuda_constants() -> dict[str, int]:
    """Constants that are passed to them, by their names in cuda.h."""

class FakeGpu:
    """A lane of a GPU over the FAKE driver of tests/native/fake_cuda.h: host memory stands in for the GPU's, and a
    thread for each stream. It shows order and bookkeeping, but nothing about speed. One at a time in a process.
    """

    def __init__(
        self, load_kernel_below: int | None = None, store_kernel_below: int | None = None
    ) -> None: ...
    @property
    def lane(self) -> Lane: ...
    def ways(self) -> dict[str, str]:
        """See `c_ext.CudaLane.ways`."""
    def identity(self) -> tuple[str, str]:
        """See `c_ext.cuda_identity`."""
    @property
    def stream(self) -> int:
        """The engine's."""
    def enqueue(self, work: Callable[[], None]) -> None:
        """Enqueues work on the engine's stream, which that stream's thread runs in its turn."""
    def hold_copies(self, held: bool) -> None:
        """Stops every stream except the engine's, or releases them."""
    def drain(self) -> None:
        """Returns when the engine's stream has nothing left to do."""
    def violations(self) -> list[str]:
        """Descriptions of the driver's rules that were broken."""
