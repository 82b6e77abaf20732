"""If one rank fails in a blended forward pass, the other rank does not wait for it in a collective operation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import forward
from flexkv.adapters.vllm.blend.forward import ANOTHER_RANK, BlendForward
from flexkv.adapters.vllm.blend.forward_rows import (
    CachedRowsError,
    OwnWork,
    ReusedRows,
    RowsLost,
    TakenRows,
)
from flexkv.adapters.vllm.blend.rows import BatchRows, kept_rows
from flexkv.blend.turned_rows import LostStretches
from flexkv.transfer.layerwise.base import PipelineError

RANKS, LAYERS, CHECK, ROWS = 2, 6, 1, 12
REUSED = np.arange(2, 8, dtype=np.int64)
TAKEN = np.arange(8, 12, dtype=np.int64)
WAIT_S = 20.0
SHORT_S = 0.5
"""Seconds for which, in control tests, a rank waits in a collective operation for a rank that has left."""


class Group:
    """A group whose ranks are threads. Each collective operation waits for all of them."""

    world_size = RANKS

    def __init__(self, wait_s: float) -> None:
        self._given: dict[int, Any] = {}
        self._barrier = threading.Barrier(RANKS, timeout=wait_s)
        self.rank = threading.local()

    def _all(self, given: Any) -> list[Any]:
        self._given[self.rank.number] = given
        self._barrier.wait()
        found = [self._given[rank] for rank in range(RANKS)]
        self._barrier.wait()
        return found

    def all_reduce(self, given: Any) -> Any:
        return torch.stack(self._all(given)).sum(0)

    def broadcast(self, given: Any, src: int) -> Any:
        return self._all(given)[src]


class Attention(torch.nn.Module):
    num_kv_heads, head_size, kv_cache = 1, 4, None

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_name = f"layer{number}"
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *given: None)

    def forward(self, query: Any, keys: Any, values: Any) -> Any:
        return query


class Layer:
    """A layer in which the ranks sum their partial results, as in a tensor-parallel model."""

    def __init__(self, number: int, group: Group) -> None:
        self.self_attn = SimpleNamespace(attn=Attention(number))
        self._group = group

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        fresh = torch.ones(len(hidden), 4)
        self.self_attn.attn(hidden, fresh, fresh)
        return self._group.all_reduce(hidden), hidden


Fault = Callable[[str, int], None]
"""A function that is called at each step of flexkv's work on the rank that fails, with the name of the step and the
layer. It raises an error to make the step fail."""


class Rows:
    """One rank's cached rows. The same object is the source and the opened rows."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._chosen = fault, len(REUSED)
        self.opened = self.closed = 0

    def open(self, first: int) -> Rows:
        self._fault("open", first)
        self.opened += 1
        return self

    def choose(self, chosen: Any) -> None:
        self._fault("choose", -1)
        self._chosen = len(chosen)

    def take(self, layer: int) -> Any:
        self._fault("take", layer)
        return torch.zeros(2, self._chosen, 1, 4)

    def close(self, wait: bool = True) -> None:
        self.closed += 1
        self._fault("close", -1)


class World:
    """One forward pass on two ranks, one of which fails.

    Attributes:
        may_lose: whether the forward pass may go on if the rows of a new segment cannot be captured.
        lost: by rank, the error because of which the rank's rows could not be captured.
    """

    def __init__(self, patch: pytest.MonkeyPatch, wait_s: float = WAIT_S) -> None:
        self.group = Group(wait_s)
        context = SimpleNamespace(slot_mapping={"layer0": torch.arange(ROWS)})
        patch.setattr(forward, "get_tp_group", lambda: self.group)
        patch.setattr(forward, "get_forward_context", lambda: context)
        patch.setattr(forward, "override_forward_context", lambda context: contextlib.nullcontext())
        self.may_lose = False
        self.lost: dict[int, Exception] = {}
        self.ended: dict[int, Any] = {}
        self.rows: dict[int, Rows] = {}

    def _run(self, rank: int, fault: Fault) -> None:
        self.group.rank.number = rank
        decoder = SimpleNamespace(
            embed_input_ids=lambda ids: ids[:, None].expand(-1, 8).float(),
            layers=[Layer(number, self.group) for number in range(LAYERS)],
            norm=lambda hidden, residual: (hidden, residual),
        )
        at = np.arange(ROWS, dtype=np.int64)
        batch = BatchRows(np.array([0, ROWS], np.int64), at, at)
        self.rows[rank] = rows = Rows(fault)
        lose = partial(self.lost.__setitem__, rank) if self.may_lose else None
        taken = TakenRows(TAKEN, lambda layer, planes: fault("taken", layer), lose)

        def context_of(context: Any, batch: BatchRows, kept: Any) -> Any:
            fault("context", -1)
            return context

        def choose(*given: Any) -> Any:
            fault("rows", -1)
            return kept_rows(*given)

        try:
            blended = BlendForward(SimpleNamespace(model=decoder), None, CHECK)
            blended._context, blended.choose = context_of, choose  # type: ignore[method-assign]
            ids = torch.arange(ROWS)
            self.ended[rank] = blended.run(ids, ids, batch, [ReusedRows(REUSED, rows, 0.0)], [taken])
        except Exception as error:
            self.ended[rank] = error

    def run(self, fault: Fault, rank: int = 1) -> list[Any]:
        """Runs the forward pass. Returns for each rank the result of the forward pass, or the exception that it raised.

        Args:
            rank: the rank that fails.
        """
        faults: list[Fault] = [lambda place, layer: None] * RANKS
        faults[rank] = fault
        threads = [threading.Thread(target=self._run, args=each) for each in enumerate(faults)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(2 * WAIT_S)
        return [self.ended[rank] for rank in range(RANKS)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(monkeypatch)
    yield made
    assert all(rows.opened == rows.closed for rows in made.rows.values())


def failing(*at: tuple[str, int], error: type[Exception] = PipelineError) -> Fault:
    def fault(place: str, layer: int) -> None:
        if (place, layer) in at:
            raise error("gone")

    return fault


def test_ranks_that_do_not_fail_keep_the_same_rows(world: World) -> None:
    for _, keep in world.run(failing()):
        assert np.flatnonzero(~keep).tolist() == REUSED.tolist()


@pytest.mark.parametrize("error", [PipelineError, RuntimeError], ids=["ours", "torch's"])
@pytest.mark.parametrize("at", [("open", CHECK), ("take", CHECK), ("choose", -1), ("context", -1)])
def test_all_rows_are_computed_on_all_ranks_where_one_fails_before_the_first_later_layer(
    world: World, at: tuple[str, int], error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    ended = world.run(failing(at, error=error))
    for hidden, keep in ended:
        assert keep.all()
        assert torch.equal(hidden, ended[0][0])
    assert caplog.text.count("all rows of a step are computed: gone") == 1
    assert caplog.text.count(f"all rows of a step are computed: {ANOTHER_RANK}") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_are_those_of_the_first_rank_and_all_if_it_cannot_choose(
    world: World, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _, keep in world.run(failing(("rows", -1), error=MemoryError), rank):
        assert np.flatnonzero(~keep).tolist() == (REUSED.tolist() if rank else [])
    (record,) = caplog.records
    assert record.getMessage() == "this rank cannot choose rows of a step"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], MemoryError)


@pytest.mark.parametrize("layer", [0, CHECK + 1, LAYERS - 1])
def test_rows_that_may_be_lost_are_lost_on_the_rank_that_cannot_take_them(world: World, layer: int) -> None:
    """If a rank cannot capture rows of a new segment, the segment is lost on this rank, and the forward pass goes on.
    The next test is the control: there, the forward pass may not lose such rows.
    """
    world.may_lose = True
    for _, keep in world.run(failing(("taken", layer), error=MemoryError)):
        assert np.flatnonzero(~keep).tolist() == REUSED.tolist()
    assert list(world.lost) == [1]
    assert isinstance(world.lost[1], MemoryError)


@pytest.mark.parametrize(
    "at",
    [
        [("take", CHECK), ("close", -1)],
        [("context", -1), ("close", -1)],
        [("take", CHECK + 1)],
        [("take", LAYERS - 1)],
        [("taken", 0)],
        [("taken", LAYERS - 1)],
        [("close", -1)],
    ],
    ids=[
        "still moves at the check layer",
        "and behind it",
        "later",
        "last",
        "taken first",
        "taken last",
        "close",
    ],
)
def test_every_rank_raises_where_one_cannot_go_on(world: World, at: list[tuple[str, int]]) -> None:
    other, failed = world.run(failing(*at))
    assert isinstance(failed, CachedRowsError)
    assert isinstance(other, CachedRowsError)
    assert "gone" in str(failed)
    assert isinstance(failed.__cause__, PipelineError)
    assert ANOTHER_RANK in str(other)


@pytest.mark.parametrize("layer", [CHECK, CHECK + 1, LAYERS - 1])
def test_every_rank_begins_again_where_one_has_lost_rows(world: World, layer: int) -> None:
    for ended in world.run(failing(("take", layer), error=LostStretches)):
        assert isinstance(ended, RowsLost)


@pytest.mark.parametrize(
    "at",
    [[("take", CHECK), ("close", -1)], [("take", CHECK + 1), ("close", -1)]],
    ids=["check layer", "later"],
)
def test_no_rank_begins_again_while_lost_rows_still_move(world: World, at: list[tuple[str, int]]) -> None:
    for ended in world.run(failing(*at, error=LostStretches)):
        assert isinstance(ended, CachedRowsError)


def test_control_ranks_that_do_not_agree_on_lost_rows_go_apart(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    def alone(puts: Any, others: Any, device: Any) -> None:
        if puts is not None:
            raise puts

    monkeypatch.setattr(forward, "_raise_alike", alone)
    other, failed = world.run(failing(("take", LAYERS - 1), error=LostStretches))
    assert isinstance(failed, LostStretches)
    assert isinstance(other, tuple), "it goes on with its rows"


@pytest.mark.parametrize(
    "at",
    [
        ("open", CHECK),
        ("take", CHECK),
        ("rows", -1),
        ("choose", -1),
        ("context", -1),
        ("take", CHECK + 1),
        ("taken", 0),
    ],
)
def test_control_a_rank_that_raises_where_it_fails_leaves_the_other_one_waiting(
    monkeypatch: pytest.MonkeyPatch, at: tuple[str, int]
) -> None:
    monkeypatch.setattr(OwnWork, "do", lambda self, work, *given: work(*given))
    other, failed = World(monkeypatch, SHORT_S).run(failing(at))
    assert isinstance(failed, PipelineError)
    assert isinstance(other, threading.BrokenBarrierError)
