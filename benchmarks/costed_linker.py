"""flexkv's SGLang linker with a clock on every hook (`hook_clock`), and on those that the engine's pools call."""

from __future__ import annotations

from benchmarks.hook_clock import Ledger, hooks_of
from flexkv.adapters.sglang.linker import FlexKVLinker
from flexkv.adapters.sglang.load_batches import LoadBatches


class CostedLinker(FlexKVLinker):
    """A user's linker, with its hooks timed."""


LEDGER = Ledger()
LEDGER.put_clocks(CostedLinker, FlexKVLinker, hooks_of(FlexKVLinker))
# The linker makes this class's objects itself. Hooks that have a clock already call its other methods.
LEDGER.put_clocks(LoadBatches, LoadBatches, ("set_consumer", "wait_until"))
