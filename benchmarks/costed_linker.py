"""flexkv's SGLang linker. `benchmarks.hook_clock` times all its hooks, including those that the engine's pools call."""

from __future__ import annotations

from benchmarks.hook_clock import Ledger, hooks_of
from flexkv.adapters.sglang.linker import FlexKVLinker
from flexkv.adapters.sglang.load_batches import LoadBatches


class CostedLinker(FlexKVLinker):
    """flexkv's linker as users configure it, with its hooks timed."""


LEDGER = Ledger()
LEDGER.put_clocks(CostedLinker, FlexKVLinker, hooks_of(FlexKVLinker))
# The linker makes `LoadBatches` objects itself, so the timed methods are set on that class. The other methods of
# `LoadBatches` are called only by hooks that are already timed.
LEDGER.put_clocks(LoadBatches, LoadBatches, ("set_consumer", "wait_until"))
