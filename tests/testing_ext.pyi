"""Parts of the native core for tests only: decorators that inject faults or count calls, GPU code that runs on the CPU,
and a FAKE GPU.

Built in place beside the native core from csrc/testing/.
"""

from collections.abc import Callable

from flexkv.c_ext import Lane, PageMover, QueueWrapper

class CountingMover(PageMover):
    """Passes all calls to `inner` and counts their results."""

    def __init__(self, inner: PageMover) -> None: ...
    def count(self, kind: int) -> tuple[int, int, int, float]:
        """Returns for ops of `kind`: the number of moves that succeeded (layerwise: one per page and layer), the number
        of moves that failed, the bytes of those that succeeded, and the seconds spent in calls, summed over threads.
        """

class FaultRule:
    """What a FaultyMover does to a call that meets all given conditions. `action` is 0 (fail with `reason`), 1 (delay
    by `delay_s` seconds), 2 (stall until `release()`), or 3 (corrupt the first `corrupt_bytes` that arrived; 0: all).
    `nth_op` is the number of an op, counted from 0 in the order in which the mover first sees ops; if `kind` is given,
    only ops of that kind count. `times` limits how often the rule acts (-1: no limit).
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
    """Passes calls to `inner` and injects faults. If several rules match a call, only the first one acts."""

    def __init__(self, inner: PageMover, rules: list[FaultRule]) -> None: ...
    def release(self) -> None:
        """Lets stalled calls continue. Later calls do not stall any more."""
    def wait_stalled(self, count: int, deadline_s: float) -> bool: ...
    @property
    def calls(self) -> int: ...
    @property
    def acted(self) -> int: ...
    @property
    def stalled(self) -> int: ...

class IoFaultRule:
    """What happens to I/Os that meet all given conditions. `action` is 0 (fail with the errno `error`), 1 (move only
    the first `bytes` bytes), 2 (flip a bit of the byte at offset `bytes` in the moved data), or 3 (hang until
    `IoFaults.release`). `nth` is the number of an I/O, counted from 0 over those that meet the other conditions.
    `times` limits how often the rule acts (-1: no limit).
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
    """Injects faults into a DiskLane's I/O. If several rules match an I/O, only the first one acts."""

    def __init__(self, rules: list[IoFaultRule]) -> None: ...
    def add(self, rule: IoFaultRule) -> None: ...
    def release(self) -> None:
        """Removes all rules, and lets I/Os that hang continue."""
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
    """Does the same as `flexkv.c_ext.rotate_rows`, but on the CPU with the GPU's code, one thread of a warp after
    another.
    """

def cuda_layouts() -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the layouts of structures that are passed to the CUDA driver and to cuFile, by the structure's name: for
    each field, its offset and size in bytes. The entry "" is the complete structure.
    """

def cuda_constants() -> dict[str, int]:
    """Returns the constants that are passed to the CUDA driver, by their names in cuda.h."""

class FakeGpu:
    """A GPU's lane on the FAKE driver of tests/native/fake_cuda.h, in which host memory replaces the GPU's memory, and
    a thread replaces each stream. Tests with it can check order and bookkeeping, but not speed. A process may have only
    one FakeGpu at a time.
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
        """The handle of the engine's stream."""
    def enqueue(self, work: Callable[[], None]) -> None:
        """Enqueues work on the engine's stream. The stream's thread runs it after all earlier work."""
    def hold_copies(self, held: bool) -> None:
        """Stops every stream except the engine's, or releases them."""
    def drain(self) -> None:
        """Waits until the engine's stream has finished all its work."""
    def violations(self) -> list[str]:
        """Returns a description of each violation of the driver's rules."""
