"""If one call asks several servers, the store reads the servers' answers in turns."""

from __future__ import annotations

import time

from flexkv.remote.redis.turns import Steps, TurnWait, run_together


def test_a_server_that_always_has_more_keeps_nobody_waiting() -> None:
    served = []

    def always(turns: int) -> Steps:
        for _ in range(turns):
            yield None
            served.append("first")

    def once() -> Steps:
        yield TurnWait(-1, 0, time.monotonic())
        served.append("second")

    run_together([always(1000), once()])
    assert served.index("second") < 1000
