"""An engine with several KV groups is killed in the middle of its stores, when some groups of a boundary are on disk
and others are only in the engine. The next engine serves the complete boundaries, and its answers are right.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .conftest import BLOCKS_OF_ALL_GROUPS, FAULTY, GROUPS, Engines
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_disk import DISK_READS, DISK_WRITES, start
from .test_kill import DURABLE_WITHIN_S, wait_durable

STORED_PROMPTS, STORES_A_PROMPT = 2, 3 * GROUPS
STALLED = STORED_PROMPTS * STORES_A_PROMPT + GROUPS + 2
"""Number of the store op that stalls. This op stores a group in the middle of the second boundary of the last
prompt."""


def test_the_next_engine_takes_over_from_one_killed_between_groups(
    engines: Engines, gemma_3: Path, gemma_3_alone: Reference, tmp_path: Path, stream: int
) -> None:
    def start_on_folder(rules: list[dict[str, Any]]) -> EngineSession:
        ours = start(
            engines,
            tmp_path / "disk",
            {"FAULT_RULES": json.dumps(rules)},
            kind=FAULTY,
            engine={"model": str(gemma_3), "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS},
            store__checkpoint_tokens=8 * BLOCK_TOKENS,
        )
        return EngineSession(ours.process, gemma_3_alone)

    prompts = [Prompt.of(601 + 50 * n, stream + n) for n in range(STORED_PROMPTS + 1)]
    *stored, torn = prompts
    session = start_on_folder([{"action": "stall", "kind": "store", "nth_op": STALLED}])
    for prompt in stored:
        assert session.check_one(prompt).cached == 0
        session.settle()
    wait_durable(session, stream + 8)
    before = session.metric(DISK_WRITES)
    session.check_one(torn)
    ends_s = time.monotonic() + DURABLE_WITHIN_S
    while session.metric(DISK_WRITES) == before or not session.call("faults")["ranks"][0]["stalled"]:
        assert time.monotonic() < ends_s, (
            "no group of the last prompt has come to disk, or none is on its way"
        )
        session.check_one(Prompt.of(5, stream + 8, max_tokens=1))
    wait_durable(session, stream + 8)
    session.process.kill()

    session = start_on_folder([])
    assert [answer.cached for answer in session.check(*stored)] == [prompt.whole_blocks for prompt in stored]
    assert session.metric(DISK_READS) > 0
    assert session.check_one(torn).cached < torn.whole_blocks, "nothing of it was missing"
    session.forget()
    assert [answer.cached for answer in session.check(*prompts)] == [
        prompt.whole_blocks for prompt in prompts
    ]
