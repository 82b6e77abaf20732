"""After the last request the remaining stores are made, and then nothing runs."""

from __future__ import annotations

import json

from demo.engine_process import SEPARATE_CORE

from .conftest import FAULTY, Engines, connector
from .session import Prompt


def test_stores_in_flight_end_after_the_last_request(engines: Engines, stream: int) -> None:
    """The engine's own loop, in its own process, must keep stepping while copies are under way, and then stop."""
    rules = [{"action": "delay", "kind": "store", "delay_s": 0.02}]
    session = engines.get(connector(FAULTY), {**SEPARATE_CORE, "FAULT_RULES": json.dumps(rules)})
    prompt = Prompt.of(900, stream, max_tokens=1)
    session.check_one(prompt)
    # 28 pages at 20 ms each take much longer than the one token.
    session.call("idle", seconds=3.0)
    assert session.call("reset")["done"]
    assert session.check_one(prompt).cached == prompt.whole_blocks
    session.call("idle", seconds=4.0)
    quiet = session.call("idle", seconds=3.0)["cpu_share"]
    # Only a rough check (the benchmark measures this): an engine that spins would use a whole CPU.
    assert quiet < 0.3
