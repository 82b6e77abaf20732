"""Engines of several processes: tensor parallelism, and two engines on one node."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import FAULTY, Engines, connector
from .session import EngineSession, Prompt

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
HOST_CONFIG = """\
host:
  bytes: 48MiB
store:
  tokens: all
load:
  mode: async
"""


def two_ranks(engines: Engines, rules: list[dict[str, object]]) -> EngineSession:
    environment = {**TWO_RANKS, "FAULT_RULES": json.dumps(rules)}
    return engines.get(connector(FAULTY), environment, tensor_parallel_size=2)


SLOW_SECOND_RANK: list[dict[str, object]] = [
    {"action": "delay", "kind": "load", "delay_s": 0.03, "rank": 1},
    {"action": "fail", "kind": "load", "page": 7, "nth_op": 2, "rank": 1},
]
"""Fault rules for two ranks: every load is slow on rank 1, and a page of the third load fails on that rank."""


def test_two_ranks_serve_slow_loads_and_one_that_fails_on_one_rank(engines: Engines, stream: int) -> None:
    session = two_ranks(engines, SLOW_SECOND_RANK)
    prompt = Prompt.of(600, stream)
    session.check_one(prompt)
    for seed in (1, 2, 3, 4):
        session.forget(seed)
        session.check_one(prompt)
    acted = [rank["acted"] for rank in session.call("faults")["ranks"]]
    assert acted[0] == 0 < acted[1]
    session.forget()
    assert session.check_one(prompt).cached == prompt.whole_blocks


def test_an_abort_while_one_rank_is_still_loading(engines: Engines, stream: int) -> None:
    two_ranks(engines, SLOW_SECOND_RANK).abort_while_loading(stream)


def test_two_engines_on_one_node_from_one_file(engines: Engines, stream: int, tmp_path: Path) -> None:
    settings = tmp_path / "flexkv.yaml"
    settings.write_text(HOST_CONFIG)
    config = {key: value for key, value in connector().items() if key != "kv_connector_extra_config"}
    environment = {"FLEXKV_CONFIG": str(settings)}
    first = engines.another(config, environment)
    second = engines.another(config, environment)
    mine, yours = Prompt.of(500, stream), Prompt.of(450, stream + 1)
    first.check_one(mine)
    second.check_one(yours)
    for session, known, unknown in ((first, mine, yours), (second, yours, mine)):
        session.forget()
        assert session.check_one(known).cached == known.whole_blocks
        assert session.check_one(unknown).cached == 0
        assert session.metric("vllm:flexkv_host_slots") > 300
    # The first engine ends, and the second one continues.
    first.process.close()
    second.forget()
    assert second.check_one(yours).cached == yours.whole_blocks
