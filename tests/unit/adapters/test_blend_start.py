"""Tests the start of ranks with blending, and their steps. Either all ranks blend or none does. If vLLM runs a step
without calling the model's forward function, the rows of the step are counted in a metric.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import worker as module
from flexkv.adapters.vllm.blend.orders import BlendOrders, ChunkOrder, Reuse, SegmentOrder
from flexkv.adapters.vllm.blend.pages import BlendPages
from flexkv.adapters.vllm.blend.worker import ANOTHER, BlendWorker
from flexkv.blend.registry import NotBlendable
from flexkv.config import FlexKVConfig
from flexkv.errors import CapacityError
from flexkv.observe import BlendResult, Counters

DEADLINE_S = 60.0
SHORT_S = 0.5
NO_ROOM = "no room for segments"
CHUNK = ChunkOrder("r1", 0, np.arange(8, dtype=np.int64), Reuse(((2, 4),), 0.15))


class Group:
    """A group whose ranks are threads of this process. Each collective operation waits for all of them."""

    device = "cpu"

    def __init__(self, ranks: int, wait_s: float) -> None:
        self.world_size = ranks
        self._given: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(ranks, timeout=wait_s)

    def all_reduce(self, flags: torch.Tensor) -> torch.Tensor:
        self._given[threading.get_ident()] = flags
        self._barrier.wait()
        total = sum(self._given.values(), torch.zeros_like(flags))
        self._barrier.wait()
        return total


class Cache:
    deadline_s = DEADLINE_S
    unit = SimpleNamespace(close_s=DEADLINE_S, streams=False)

    def __init__(self) -> None:
        self.is_closed = False

    def close(self, close_s: float) -> None:
        self.is_closed = True


class Ranks:
    """Starts ranks, with stand-ins for vLLM and for the segments.

    Attributes:
        fails: called with the rank's number when a rank makes its rotation.
        turns: called with the rank's number when a rank rotates rows on the pool's device.
        started: by rank, the rank's worker, or the exception that its start raised.
    """

    def __init__(self, patch: pytest.MonkeyPatch, ranks: int = 1, wait_s: float = DEADLINE_S) -> None:
        self.group = Group(ranks, wait_s)
        self.fails: Callable[[int], None] = lambda rank: None
        self.turns: Callable[[int], None] = lambda rank: None
        self.caches: list[Cache] = []
        self.started: dict[int, Any] = {}
        self.counters = Counters()
        self._rank = threading.local()
        pool = SimpleNamespace(kv_cache=torch.empty(0))
        layer = SimpleNamespace(self_attn=SimpleNamespace(attn=pool))
        self.model = SimpleNamespace(model=SimpleNamespace(layers=[layer]), blend_step=None)
        parts: dict[str, Any] = {
            "get_tp_group": lambda: self.group,
            "engine_refusal": lambda config: "",
            "model_of": lambda config: self.model,
            "model_refusal": lambda *given: "",
            "rotation_of": lambda *given: self.fails(self._rank.number),
            "check_turning": lambda pages: self.turns(self._rank.number),
            "shape_of": lambda model: SimpleNamespace(layers=1, row_bytes=64),
            "SegmentCache": self._cache,
            "BlendForward": lambda *given: None,
            "SelfTest": lambda *given: SimpleNamespace(refusal=self._compute),
        }
        for name, part in parts.items():
            patch.setattr(module, name, part)

    def _cache(self, *given: Any, **more: Any) -> Cache:
        self.caches.append(Cache())
        return self.caches[-1]

    def _compute(self) -> str:
        """Waits for all ranks, as a layer of a tensor-parallel model does."""
        self.group.all_reduce(torch.zeros(1))
        return ""

    def _start(self, rank: int) -> None:
        self._rank.number = rank
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=self.group.world_size),
            model_config=SimpleNamespace(max_model_len=64),
        )
        geometry: Any = SimpleNamespace(groups=[0], num_blocks=9)
        settings = FlexKVConfig.model_validate({"blend": {"enabled": True}})
        try:
            self.started[rank] = BlendWorker(config, settings, rank, geometry, self.counters)
        except Exception as error:
            self.started[rank] = error

    def start(self) -> list[str]:
        """Starts all ranks at once. Returns for each rank the reason why it cannot blend, or the name of the exception
        that its start raised.
        """
        threads = [
            threading.Thread(target=self._start, args=(rank,)) for rank in range(self.group.world_size)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(2 * DEADLINE_S)
        found = [self.started[rank] for rank in range(self.group.world_size)]
        return [getattr(each, "refusal", type(each).__name__) for each in found]


def no_room(rank: int) -> None:
    if rank == 1:
        raise CapacityError(NO_ROOM)


def test_ranks_that_all_can_blend(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(monkeypatch, 2)
    assert ranks.start() == ["", ""]
    assert not caplog.records
    assert not any(cache.is_closed for cache in ranks.caches)


def test_a_rank_that_cannot_blend_turns_it_off_on_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(monkeypatch, 2)
    ranks.fails = no_room
    assert ranks.start() == [ANOTHER, NO_ROOM]
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    off = "blending is off, and requests that ask for it are computed fully: "
    assert sorted(warned) == sorted([off + ANOTHER, off + NO_ROOM]), "one warning on each rank"
    (cache,) = ranks.caches
    assert cache.is_closed


def test_a_rank_that_cannot_turn_rows_turns_blending_off_on_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def turns(rank: int) -> None:
        if rank == 1:
            raise NotBlendable("cached rows cannot be turned on cuda:1: built without CUDA")

    ranks = Ranks(monkeypatch, 2)
    ranks.turns = turns
    assert ranks.start() == [ANOTHER, "cached rows cannot be turned on cuda:1: built without CUDA"]
    assert all(cache.is_closed for cache in ranks.caches)
    assert caplog.text.count("blending is off") == 2, "one warning per rank"


def test_control_without_agreement_the_other_rank_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2, SHORT_S)
    ranks.fails = no_room
    monkeypatch.setattr(module, "_on_all_ranks", lambda here: here)
    assert ranks.start() == ["BrokenBarrierError", NO_ROOM]


def test_what_a_part_of_vllm_raises_turns_blending_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(monkeypatch, 2)

    def other_rotary(rank: int) -> None:
        _, _ = (1, 2, 3)[: 2 + rank]

    ranks.fails = other_rotary
    assert ranks.start() == [ANOTHER, "ValueError: too many values to unpack (expected 2)"]
    assert caplog.text.count("blending cannot be prepared") == 1
    assert caplog.text.count("blending is off") == 2


def test_one_rank_asks_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.group.all_reduce = lambda flags: flags  # type: ignore[method-assign]
    monkeypatch.setattr(module, "_on_all_ranks", lambda here: pytest.fail("its group may not be set up"))
    assert ranks.start() == [""]


# --- steps ---


def unplaced(ranks: Ranks) -> dict[str, float]:
    return dict(ranks.counters.data.get("flexkv_blend_rows_total", {}))


def run_steps(ranks: Ranks, calls_forward: bool) -> dict[str, float]:
    """Runs two steps with blending. Returns the values of the metric of blended rows, by outcome."""
    ranks.start()
    worker = ranks.started[0]
    for _ in range(2):
        worker.begin_step(BlendOrders(chunks=[CHUNK]))
        assert ranks.model.blend_step is not None
        if calls_forward:
            ranks.model.blend_step = None
        worker.begin_step(None)
        assert ranks.model.blend_step is None
    return unplaced(ranks)


def test_a_step_that_passes_the_model_by_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_steps(Ranks(monkeypatch), calls_forward=False) == {"unplaced": 8}
    assert caplog.text.count("without a call of the model's forward") == 1


def test_a_step_that_the_model_took_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_steps(Ranks(monkeypatch), calls_forward=True) == {}


def test_control_without_the_check_nothing_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlendWorker, "_count_missed", lambda self, step: None)
    assert run_steps(Ranks(monkeypatch), calls_forward=False) == {}


# --- loads that cannot begin ---


@pytest.mark.parametrize("at_once", [True, False])
def test_a_load_that_cannot_begin_is_lost(at_once: bool) -> None:
    def fail(*given: Any) -> Any:
        raise CapacityError(NO_ROOM)

    fetch = SimpleNamespace(begin_load=fail, give_up=lambda: None, missed={})
    cache: Any = SimpleNamespace(
        begin_fetch=fail if at_once else lambda segments, caller: fetch,
        poll=lambda: None,
        unit=SimpleNamespace(take_moved=dict),
    )
    rotation: Any = None
    pages = BlendPages(cache, rotation, torch.float32, "cpu", Counters())
    pages.begin_load(SegmentOrder("r1", 7, (np.arange(20), np.arange(30)), ""))
    arrival = pages.take_arrived()["r1"]
    assert (arrival.load, arrival.tokens, arrival.missing) == (7, (0, 0), BlendResult.LOST)
