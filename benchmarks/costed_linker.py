"""flexkv's SGLang linker, with a clock from `benchmarks.hook_clock` on every hook, including the hooks that the
engine's pools call.
"""

from __future__ import annotations

from benchmarks.hook_clock import Ledger, hooks_of
from flexkv.adapters.sglang.linker import FlexKVLinker
from flexkv.adapters.sglang.load_batches import LoadBatches


class CostedLinker(FlexKVLinker):
    """flexkv's linker as users configure it, with its hooks timed."""


LEDGER = Ledger()
LEDGER.put_clocks(CostedLinker, FlexKVLinker, hooks_of(FlexKVLinker))
# The linker makes `LoadBatches` objects itself, so the class is changed in place. Its other methods are
# called by hooks that already have a clock.
LEDGER.put_clocks(LoadBatches, LoadBatches, ("set_consumer", "wait_until"))
