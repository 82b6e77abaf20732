"""A step's plan is used by one forward pass of the model, however late vLLM ends the step. If a rank does not find a
chunk in its batch, all ranks compute this chunk fully.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import worker as module
from flexkv.adapters.vllm.blend.forward_rows import RowsLost
from flexkv.adapters.vllm.blend.model import BlendingModel
from flexkv.adapters.vllm.blend.orders import BlendOrders, ChunkOrder, NewSegment, Reuse
from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.adapters.vllm.blend.rows import BatchRows
from flexkv.adapters.vllm.blend.worker import BlendStep
from flexkv.observe import BlendResult, Counters
from tests.unit.adapters import model_runners
from tests.unit.adapters.model_runners import DeferringRunnerV2
from tests.unit.adapters.scheduled_engine import ScheduledEngine
from tests.unit.adapters.scheduled_pools import full
from tests.unit.adapters.test_blend_start import SHORT_S, Group, Ranks
from tests.unit.blend.loaded_world import ROTATION, SHAPE, make_cache

WAIT_S = 20.0
REUSED = Reuse(((2, 4),), 0.15)


def chunk(request: str, slot: int, asks: Reuse | NewSegment = REUSED) -> ChunkOrder:
    return ChunkOrder(request, 0, np.arange(slot, slot + 8, dtype=np.int64), asks)


# --- steps that end late ---


class Plain:
    """Stands for vLLM's model class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Makes a model without weights."""

    def forward(self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any) -> str:
        return "plain"


class Blending(BlendingModel, Plain):
    """A blending class, derived like the one that flexkv makes for each architecture."""


class Keeping(Blending):
    """For the control test: a model that keeps its plan after a forward pass has used it."""

    def forward(self, *given: Any, **more: Any) -> Any:
        step = self.blend_step
        answer = super().forward(*given, **more)
        self.blend_step = step
        return answer


@pytest.fixture
def make_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], ScheduledEngine]]:
    engines: list[ScheduledEngine] = []

    def make(runner: str) -> ScheduledEngine:
        monkeypatch.setitem(model_runners.RUNNERS, "V2 deferring", DeferringRunnerV2)
        engines.append(ScheduledEngine(tmp_path, [full(4)], runner=runner))
        return engines[0]

    yield make
    for engine in engines:
        engine.close()


class PlannedStep:
    """Stands for a plan. Its forward pass returns the names of the plan's requests."""

    def __init__(self, forward: Any, pages: Any, chunks: list[ChunkOrder], counters: Any) -> None:
        self._names = "+".join(each.request for each in chunks)

    def forward(self, input_ids: Any, positions: Any) -> str:
        return self._names

    def count_unplaced(self) -> None:
        """Does not count any row."""


def forwards_of(
    engine: ScheduledEngine, patch: pytest.MonkeyPatch, model: BlendingModel, plans: list[str]
) -> list[list[str]]:
    """Runs one step per plan ("" means no plan). Each step has three forward passes: of the target model, of the draft
    model, and one after the step, like the dummy pass of an idle rank. Returns for each step the plans that these
    passes used.
    """
    pages = SimpleNamespace(
        take_arrived=dict, take_stored=dict, busy=False, streams=False, close=lambda: None
    )
    patch.setattr(module, "BlendPages", lambda *given: pages)
    patch.setattr(module, "BlendStep", PlannedStep)
    ranks = Ranks(patch)
    ranks.model = model  # type: ignore[assignment]
    model.model = SimpleNamespace(  # type: ignore[attr-defined]
        layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(kv_cache=torch.empty(0))))]
    )
    assert ranks.start() == [""]
    engine.worker.worker.blend = ranks.started[0]
    schedule, of_layer = engine.scheduler.schedule, engine.worker.save_kv_layer
    seen: list[list[str]] = []

    def planned() -> Any:
        output = schedule()
        name = plans[len(seen)]
        orders: Any = output.kv_connector_metadata
        orders.blend = BlendOrders(chunks=[chunk(name, 0)]) if name else None
        seen.append([])
        return output

    def compute(*given: Any) -> None:
        seen[-1].append(model.forward(torch.arange(8), torch.arange(8)))

    def last_layer(*given: Any) -> None:
        of_layer(*given)
        compute()

    patch.setattr(engine.scheduler, "schedule", planned)
    patch.setattr(engine.worker, "save_kv_layer", last_layer)
    engine.sample = compute
    engine.add("r", range(3, 11), output=len(plans))
    for _ in plans:
        engine.step()
        compute()
    return seen


@pytest.mark.parametrize("runner", ["V1", "V2", "V2 deferring"])
def test_a_plan_serves_one_forward_however_late_its_step_ends(
    make_engine: Callable[[str], ScheduledEngine], monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    plans = ["one", "", "two", "three"]
    seen = forwards_of(make_engine(runner), monkeypatch, Blending(vllm_config=None), plans)
    assert seen == [[name or "plain", "plain", "plain"] for name in plans]


def test_control_a_model_that_leaves_the_plan_blends_the_drafts_forward(
    make_engine: Callable[[str], ScheduledEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = forwards_of(
        make_engine("V2 deferring"), monkeypatch, Keeping(vllm_config=None), ["one", "", "two"]
    )
    assert seen == [["one"] * 3, ["plain"] * 3, ["two"] * 3]


class Step:
    """Stands for a plan that finds none of its rows in the batch, and so computes nothing."""

    def forward(self, input_ids: Any, positions: Any) -> None:
        return None


@pytest.mark.parametrize("more", [{}, {"inputs_embeds": 1}, {"intermediate_tensors": 1}, {"extra": 1}])
def test_what_a_plan_cannot_compute_the_model_computes(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    given: list[Any] = []

    def forward(self: Any, *arguments: Any, **named: Any) -> str:
        given.append((arguments, named))
        return "plain"

    monkeypatch.setattr(Plain, "forward", forward)
    model = Blending(vllm_config=None)
    model.blend_step = Step() if not more else PlannedStep(None, None, [chunk("one", 0)], None)
    assert model.forward(1, 2, **more) == "plain"
    assert model.blend_step is None
    wanted = (1, 2, more.get("intermediate_tensors"), more.get("inputs_embeds"))
    assert given == [(wanted, {"extra": 1} if "extra" in more else {})]


# --- chunks that a rank does not find ---


class Pages:
    """Stands for one rank's segments.

    Attributes:
        lost: numbers of the new segments that were not captured because their rows were not found.
        gone: requests whose segments turn out to be lost when the rank waits for them.
    """

    def __init__(self, *held: str) -> None:
        self._held = held
        self.lost: list[int] = []
        self.gone: set[str] = set()

    def holds(self, request: str) -> bool:
        return request in self._held

    def drop_lost(self, request: str, wait: bool) -> set[int]:
        return {0} if request in self._held and not (wait and request in self.gone) else set()

    def begin_capture(self, request: str, asks: NewSegment, first: int) -> bool:
        return request in self._held

    def lose_capture(self, request: str, asks: NewSegment) -> None:
        self.lost.append(asks.number)

    def end_capture(self, request: str, asks: NewSegment, end: int) -> None:
        """Does not store the segment."""


class Forward:
    """Stands for the model's layers. For each call, records the requests whose cached rows the call reuses, and the
    first row of each new segment that it captures.

    Attributes:
        loses: how many of the next calls lose cached rows.
    """

    def __init__(self, slots: Any) -> None:
        at = np.arange(len(slots), dtype=np.int64)
        starts = np.arange(0, len(slots) + 1, 8, dtype=np.int64)
        self._batch = BatchRows(starts, np.asarray(slots, np.int64), at % 8)
        self.ran: list[Any] = []
        self.loses = 0

    def batch(self, positions: Any) -> BatchRows:
        return self._batch

    def run(self, input_ids: Any, positions: Any, batch: BatchRows, reused: Any, taken: Any) -> Any:
        requests = [each.source.chunk.request for each in reused]
        self.ran.append((requests, [int(each.rows[0]) for each in taken]))
        if self.loses:
            self.loses -= 1
            raise RowsLost("gone")
        return "blended", np.zeros(batch.rows, np.bool_)


class Rank:
    def __init__(self, slots: Any, *held: str) -> None:
        self.forward, self.counters = Forward(slots), Counters()
        self.pages: Any = Pages(*held)
        self.hidden: Any = "not called"

    def compute(self, chunks: list[ChunkOrder]) -> None:
        forward, pages = self.forward, self.pages
        self.hidden = BlendStep(forward, pages, chunks, self.counters).forward(None, None)  # type: ignore[arg-type]

    @property
    def rows(self) -> dict[str, float]:
        return dict(self.counters.data.get("flexkv_blend_rows_total", {}))


def compute(patch: pytest.MonkeyPatch, chunks: list[ChunkOrder], *ranks: Rank) -> None:
    """Runs the step's forward pass on all ranks at the same time, each rank in its own thread."""
    group = Group(len(ranks), WAIT_S)
    patch.setattr(module, "get_tp_group", lambda: group)
    threads = [threading.Thread(target=rank.compute, args=(chunks,)) for rank in ranks]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * WAIT_S)


FIRST, SECOND = np.arange(8), np.arange(40, 48)
BOTH = np.concatenate([SECOND, FIRST])
CHUNKS = [chunk("a", 0), chunk("b", 40)]


def test_chunks_are_found_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(BOTH, "a", "b")
    compute(monkeypatch, CHUNKS, rank)
    assert rank.hidden == "blended"
    assert rank.forward.ran == [(["a", "b"], [])]
    assert rank.rows == {"reused": 8}


def test_a_chunk_that_is_not_in_the_batch_is_computed_fully(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(np.concatenate([SECOND, FIRST + 1]), "a", "b")
    compute(monkeypatch, CHUNKS, rank)
    assert rank.forward.ran == [(["b"], [])], "the other one is blended"
    assert rank.rows == {"reused": 4, "unplaced": 4}


def test_the_model_computes_a_step_without_any_of_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(FIRST + 100, "a", "b", "s")
    segment = NewSegment(np.arange(8), "", 5)
    compute(monkeypatch, [*CHUNKS, chunk("s", 80, segment)], rank)
    assert rank.hidden is None
    assert not rank.forward.ran
    assert rank.rows == {"unplaced": 8}
    assert rank.pages.lost == [5]


@pytest.mark.parametrize(
    "other", [Rank(np.concatenate([SECOND, FIRST + 1]), "a", "b"), Rank(BOTH, "b")], ids=["rows", "segments"]
)
@pytest.mark.parametrize("agrees", [True, False], ids=["", "control"])
def test_a_chunk_that_one_rank_alone_lacks_is_computed_fully_on_both(
    monkeypatch: pytest.MonkeyPatch, other: Rank, agrees: bool
) -> None:
    """If only one rank does not find a chunk's rows or segments, both ranks compute the chunk fully. In the control,
    the ranks do not agree on the chunks, and one rank computes fewer rows than the other.
    """
    rank = Rank(BOTH, "a", "b")
    other.forward.ran.clear()
    if not agrees:
        monkeypatch.setattr(module, "_on_all_ranks", lambda here: here)
    compute(monkeypatch, CHUNKS, rank, other)
    assert other.forward.ran == [(["b"], [])]
    assert (rank.forward.ran == other.forward.ran) == agrees
    assert (rank.rows.get("unplaced", 0) == 4) == agrees


def test_a_step_that_one_rank_alone_cannot_blend_at_all_is_computed_by_the_model_on_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Rank(FIRST, "a"), Rank(FIRST)
    compute(monkeypatch, [chunk("a", 0)], *ranks)
    assert [rank.hidden for rank in ranks] == [None, None]
    assert [rank.rows for rank in ranks] == [{"unplaced": 4}] * 2


# --- segments that are lost during a forward pass ---


def test_a_forward_that_loses_rows_begins_again_without_their_segments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(BOTH, "a", "b", "s")
    rank.forward.loses, rank.pages.gone = 1, {"b"}
    compute(monkeypatch, CHUNKS, rank)
    assert rank.hidden == "blended"
    assert rank.forward.ran == [(["a", "b"], []), (["a"], [])]
    assert rank.rows == {"reused": 4, "lost": 4}
    assert caplog.text.count("begins again without the segments that are lost: gone") == 1


@pytest.mark.parametrize("agree", [True, False], ids=["", "control"])
def test_a_segment_that_one_rank_alone_loses_is_lost_on_both(
    monkeypatch: pytest.MonkeyPatch, agree: bool
) -> None:
    ranks = Rank(BOTH, "a", "b"), Rank(BOTH, "a", "b")
    for rank in ranks:
        rank.forward.loses = 1
    ranks[1].pages.gone = {"b"}
    if not agree:
        monkeypatch.setattr(module, "_on_all_ranks", lambda here: here)
    compute(monkeypatch, CHUNKS, *ranks)
    assert ranks[1].forward.ran == [(["a", "b"], []), (["a"], [])]
    assert (ranks[0].forward.ran == ranks[1].forward.ran) == agree


def test_the_model_computes_a_step_that_loses_rows_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(BOTH, "a", "b")
    rank.forward.loses = 5
    compute(monkeypatch, CHUNKS, rank)
    assert rank.hidden is None
    assert rank.forward.ran == [(["a", "b"], [])] * 2
    assert rank.rows == {"unplaced": 8}


@pytest.mark.parametrize("guarded", [True, False], ids=["", "control"])
def test_a_rank_that_cannot_read_its_batch_has_the_model_compute_the_step_on_both(
    monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """If one rank cannot read its batch, both ranks run the step without blending. In the control, without the guard,
    the failing rank raises, and the other rank waits for it.
    """
    ranks = Rank(BOTH, "a", "b"), Rank(BOTH, "a", "b")
    monkeypatch.setattr(ranks[1].forward, "batch", no_memory)
    if not guarded:
        monkeypatch.setattr(
            BlendStep, "_batch_or_warn", lambda step, positions: step._forward.batch(positions)
        )
    ended: dict[int, Any] = {}
    group = Group(2, WAIT_S if guarded else SHORT_S)
    monkeypatch.setattr(module, "get_tp_group", lambda: group)

    def run(number: int) -> None:
        try:
            ranks[number].compute(CHUNKS)
            ended[number] = ranks[number].hidden
        except Exception as error:
            ended[number] = type(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * WAIT_S)
    assert ended == ({0: None, 1: None} if guarded else {0: threading.BrokenBarrierError, 1: MemoryError})
    assert not ranks[0].forward.ran


# --- segments that a rank cannot keep ---


class Computing(Forward):
    """Stands for a model in which all rows of every layer are zeros."""

    def run(self, input_ids: Any, positions: Any, batch: BatchRows, reused: Any, taken: Any) -> Any:
        for each in taken:
            planes = torch.zeros(2, len(each.rows), SHAPE.heads, SHAPE.head_dim)
            try:
                for layer in range(SHAPE.layers):
                    each.take(layer, planes)
            except MemoryError as error:
                each.lose(error)
        return super().run(input_ids, positions, batch, reused, taken)


class Keeper(Rank):
    """A rank that captures one segment in each of two steps."""

    def __init__(self) -> None:
        super().__init__(FIRST)
        self.forward = Computing(FIRST)
        self.pages = BlendPages(make_cache(), ROTATION, torch.float32, "cpu", Counters())
        self.ended: list[Any] = []

    def step(self, number: int) -> None:
        segment = NewSegment(np.arange(8) + 100 * number, "", number)
        self.compute([chunk(f"s{number}", 0, segment)])

    def steps(self) -> None:
        for number in (1, 2):
            try:
                self.step(number)
            except Exception as error:
                self.ended.append(type(error))
                return
            self.ended.append(self.hidden)

    def stored(self) -> dict[int, BlendResult]:
        ends_s = time.monotonic() + WAIT_S
        while self.pages.busy:
            assert time.monotonic() < ends_s
            self.pages.take_arrived()
        found: dict[int, BlendResult] = self.pages.take_stored()
        return found


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    made = [Keeper(), Keeper()]
    yield made
    for each in made:
        each.pages.close()


def no_memory(*given: Any, **more: Any) -> Any:
    raise MemoryError("no memory")


def run_steps(patch: pytest.MonkeyPatch, keepers: list[Keeper], wait_s: float) -> None:
    group = Group(len(keepers), wait_s)
    patch.setattr(module, "get_tp_group", lambda: group)
    threads = [threading.Thread(target=each.steps) for each in keepers]
    for each in threads:
        each.start()
    for each in threads:
        each.join(2 * WAIT_S)


@pytest.mark.parametrize("place", ["capture", "begin_store", "cached_of"])
def test_a_segment_that_one_rank_cannot_keep_is_lost_there_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, keepers: list[Keeper], place: str
) -> None:
    pages = keepers[1].pages
    with monkeypatch.context() as patch:
        patch.setattr(pages if place == "capture" else pages.cache, place, no_memory)
        run_steps(patch, keepers, WAIT_S)
        found = [each.stored() for each in keepers]
    assert [each.ended for each in keepers] == [["blended"] * 2] * 2
    assert found == [dict.fromkeys((1, 2), result) for result in (BlendResult.STORED, BlendResult.LOST)]


def test_control_a_rank_that_raises_leaves_the_other_one_waiting_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch, keepers: list[Keeper]
) -> None:
    monkeypatch.setattr(keepers[1].pages, "end_capture", no_memory)
    run_steps(monkeypatch, keepers, SHORT_S)
    assert [each.ended for each in keepers] == [["blended", threading.BrokenBarrierError], [MemoryError]]
