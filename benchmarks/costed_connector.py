"""flexkv's vLLM connector. `benchmarks.hook_clock` times all its hooks."""

from __future__ import annotations

from benchmarks.hook_clock import Ledger, hooks_of
from flexkv.adapters.vllm.connector import FlexKVConnector

HOOKS = hooks_of(FlexKVConnector)


class CostedConnector(FlexKVConnector):
    """flexkv's connector as users configure it, with its hooks timed."""


LEDGER = Ledger()
LEDGER.put_clocks(CostedConnector, FlexKVConnector, HOOKS)
