"""After the last request, the engine finishes the remaining stores and then idles."""

from __future__ import annotations

import json

from demo.engine_process import SEPARATE_CORE

from .conftest import FAULTY, Engines, connector
from .session import Prompt


def test_stores_in_flight_end_after_the_last_request(engines: Engines, stream: int) -> None:
    """Stores in flight end after the last request. The loop of an engine in a process of its own must step while copies
    are in flight, and must stop stepping afterwards."""
    rules = [{"action": "delay", "kind": "store", "delay_s": 0.02}]
    session = engines.get(connector(FAULTY), {**SEPARATE_CORE, "FAULT_RULES": json.dumps(rules)})
    prompt = Prompt.of(900, stream, max_tokens=1)
    session.check_one(prompt)
    # The copies of 28 pages take 20 ms each, much longer than the computation of the one token.
    session.call("idle", seconds=3.0)
    assert session.call("reset")["done"]
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.call("idle", seconds=4.0)
    quiet = session.call("idle", seconds=3.0)["cpu_share"]
    # An engine that spins would use a full core. This check is rough; a benchmark measures the exact share.
    assert quiet < 0.3
