"""Shows which of a request's states are stored in each step: only states that a step of the engine has written."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState

from flexkv.adapters.common.settings_reader import SettingsReader
from flexkv.adapters.vllm.engine_spec import EngineSpec
from flexkv.adapters.vllm.metadata import ConnectorMetadata
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.adapters.vllm.request_fields import RequestFields
from flexkv.adapters.vllm.requests import RequestTable
from flexkv.adapters.vllm.stores import ScheduledBlocks, make_planner
from flexkv.cache.base import StorePlan
from flexkv.cache.stores.base import StoreWatch
from flexkv.cache.stores.boundary_stores import BoundaryStores
from flexkv.config import load_config
from flexkv.facts.keys import Keys, Rule
from flexkv.facts.ranks import UnitOwner
from flexkv.observe import Counters
from flexkv.transfer.graph import BlockIds, OpId
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

FULL, STATE = 0, 1
NULL = 0
PLACES = 2


@dataclass
class Offers:
    """Stands for a cache manager. Records each state that is offered, as (block of the request, engine block)."""

    states: list[tuple[int, int]] = field(default_factory=list)

    def begin_store(
        self, request_id: str, group: int, keys: Keys, blocks: BlockIds, first: int, **_: Any
    ) -> StorePlan:
        assert len(keys) == len(blocks)
        if group == STATE:
            self.states += [(first + at, int(block)) for at, block in enumerate(blocks)]
        return StorePlan(None, np.empty(0, np.int32), len(keys), 0)


class Steps:
    """Runs one request in steps that a test chooses. The engine has a group of full attention and a group of states.

    Args:
        handed_over: whether the engine reports in which blocks states are.
    """

    def __init__(
        self,
        prompt: int,
        output: int = 0,
        handed_over: bool = False,
        checkpoint: int = BLOCK_TOKENS,
        extra: dict[str, Any] | None = None,
    ) -> None:
        def group(number: int, **fields: Any) -> BlockGeometry:
            return BlockGeometry(BLOCK_TOKENS, BLOCK_TOKENS, 99, (f"l.{number}",), number=number, **fields)

        state = group(STATE, rule=Rule.STATE, states="(8,)", states_handed_over=handed_over)
        geometry = PoolGeometry((group(FULL), state), BLOCK_TOKENS)
        config = load_config({"store.checkpoint_tokens": checkpoint, "transfer.queue_ops": PLACES}, {})
        spec = EngineSpec(config, geometry, UnitOwner("", bytes(32), "unit0"), 1, 64)
        self.request = make_request(range(prompt), extra_args=extra)
        if output:
            self.request.append_output_token_ids(list(range(1000, 1000 + output)))
        fields = RequestFields(SettingsReader(Counters(), logging.getLogger()))
        requests = RequestTable(spec, fields)
        self.tracker = requests.of(self.request)
        self.offers = Offers()
        unit: Any = SimpleNamespace(manager=self.offers, has_tiers=True, slots=99)
        self.geometry, self.requests = geometry, requests
        self.watch, self.counters = StoreWatch(), Counters()
        self.stores = make_planner(unit, spec, self.watch, self.counters, None)

    def step(
        self, end: int, states: Sequence[int], handed_over: Sequence[tuple[int, int, int]] = ()
    ) -> list[tuple[int, int]]:
        """Runs a step that computes all tokens before `end`, with `states` as the request's block table of states.
        Returns the states that the step offers to the cache manager.
        """
        request, name = self.request, self.request.request_id
        full = list(range(50, 50 + -(-end // BLOCK_TOKENS)))
        self.tracker.tables[FULL].ids[:], self.tracker.tables[STATE].ids[:] = full, states
        output: Any = SimpleNamespace(
            kv_connector_block_state=KVConnectorBlockState(
                {name}, lambda _: (full, list(states)), {name: list(handed_over)} if handed_over else {}
            ),
        )
        self.offers.states.clear()
        self.requests._note_step(self.tracker, end - request.num_computed_tokens)
        blocks = ScheduledBlocks(self.geometry, output)
        self.stores.plan_step([self.tracker], blocks, ConnectorMetadata(), idle=False)
        request.num_computed_tokens = end
        return list(self.offers.states)

    def end(self, blocks: Sequence[Sequence[int]]) -> None:
        """Ends the request, whose blocks by group are `blocks`."""
        self.requests.note_end(self.tracker)
        self.stores.ended(self.tracker, blocks)


def test_states_are_stored_where_steps_end_with_a_block() -> None:
    steps = Steps(prompt=22)
    assert steps.step(8, [NULL, 31]) == [(1, 31)]
    assert steps.step(16, [NULL, 31, NULL, 32]) == [(3, 32)]
    assert steps.step(20, [NULL, NULL, NULL, 32, 33]) == [(4, 33)]
    assert steps.step(22, [NULL, NULL, NULL, NULL, 33, 34]) == []


@pytest.mark.parametrize(("most", "stored"), [(None, [(1, 31), (3, 32)]), (15, [(1, 31)]), (7, [])])
@pytest.mark.parametrize("handed_over", [False, True])
def test_states_behind_a_requests_limit_are_not_stored(
    handed_over: bool, most: int | None, stored: list[tuple[int, int]]
) -> None:
    steps = Steps(prompt=22, handed_over=handed_over, extra={"flexkv.max_store_tokens": most})
    given: tuple[list[tuple[int, int, int]], ...] = ([], [])
    if handed_over:
        given = ([(STATE, 31, 8)], [(STATE, 32, 16)])
    offered = steps.step(8, [NULL, 31], given[0]) + steps.step(16, [NULL, 31, NULL, 32], given[1])
    assert offered == stored


def test_a_state_for_which_a_rank_has_no_place_is_counted() -> None:
    steps = Steps(prompt=22)
    for op in range(PLACES):
        steps.watch.add(OpId(op), np.zeros(1, np.int32))
    assert steps.step(8, [NULL, 31]) == []
    assert steps.counters.value("flexkv_dropped_store_pages_total", reason="busy") == 1
    steps.watch.end(OpId(0))
    assert steps.step(16, [NULL, 31, NULL, 32]) == [(3, 32)]


def test_a_state_of_the_answer_is_stored_when_its_tokens_are_certain() -> None:
    steps = Steps(prompt=10, output=4)
    steps.step(8, [NULL, 31])
    assert steps.step(10, [NULL, 31, 32]) == []
    assert steps.step(11, [NULL, NULL, 32]) == []
    assert steps.step(12, [NULL, NULL, 32]) == [], "the step's own token may not be accepted"
    assert steps.step(13, [NULL, NULL, 32, 33]) == [(2, 32)]
    assert steps.step(14, [NULL, NULL, NULL, 33]) == [], "stored before"


def test_the_last_state_of_an_answer_is_stored_at_its_end() -> None:
    steps = Steps(prompt=10, output=2)
    for end in (8, 10, 11):
        steps.step(end, [NULL, 31, 32])
    assert steps.step(12, [NULL, NULL, 32]) == []
    steps.end(([50, 51, 52], [NULL, NULL, 32]))
    assert steps.offers.states == [(2, 32)]


def test_what_a_failed_load_left_in_the_table_is_no_state() -> None:
    """A block that a failed load left in the state table is not offered as a state. The request resumes with its prompt
    and its answer after a load of 16 tokens failed. The step computes tokens 4 to 23 and writes no state to block 77.
    """
    steps = Steps(prompt=18, output=8)
    steps.request.num_computed_tokens = 4
    left = 77
    assert steps.step(24, [NULL, NULL, NULL, left, NULL, 32]) == []
    steps.end(([*range(50, 56)], [NULL, NULL, NULL, left, NULL, 32]))
    assert steps.offers.states == [(5, 32)]


def test_control_a_table_tells_not_by_itself_what_is_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(prompt=18, output=8)
    steps.request.num_computed_tokens = 4

    def note_any(_: Any, request: Any) -> None:
        request.states_at = min(request.step_end, 18) // BLOCK_TOKENS * BLOCK_TOKENS

    monkeypatch.setattr(BoundaryStores, "_note_end", note_any)
    assert steps.step(24, [NULL, NULL, NULL, 77, NULL, 32]) == [(3, 77)]


def test_a_request_that_lost_its_blocks_has_no_state() -> None:
    steps = Steps(prompt=22)
    steps.step(8, [NULL, 31])
    steps.tracker.restart()
    steps.offers.states.clear()
    steps.end(([50, 51], [NULL, 31]))
    assert steps.offers.states == []


def test_only_what_is_handed_over_is_stored_where_the_engine_says_it() -> None:
    steps = Steps(prompt=22, handed_over=True)
    assert steps.step(8, [NULL, 31]) == []
    assert steps.step(16, [NULL, 31, NULL, 32], [(STATE, 41, 16)]) == [(3, 41)]
    assert steps.step(20, [NULL, NULL, NULL, 32, 33], [(STATE, 42, 18)]) == [], "within a block"


def test_at_the_end_nothing_is_taken_by_position_where_the_engine_hands_states_over() -> None:
    steps = Steps(prompt=16, handed_over=True)
    steps.step(16, [NULL, NULL, NULL, 32])
    steps.end(([50, 51, 52, 53], [NULL, NULL, NULL, 32]))
    assert steps.offers.states == []


def test_checkpoints_are_far_from_each_other() -> None:
    steps = Steps(prompt=42, checkpoint=16)
    ends = [end for end in range(4, 44, 4) if steps.step(end, [*range(31, 31 + end // 4)])]
    assert ends == [16, 32, 40]
