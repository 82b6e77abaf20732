"""Two ranks choose the same reused rows to compute again: those whose cached keys differ most from the fresh ones,
summed over the heads of both ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import forward
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.forward_rows import ReusedRows
from flexkv.adapters.vllm.blend.rows import BatchRows

RANKS, LAYERS, CHECK, ROWS = 2, 4, 1, 9
WIDTH = 4
REUSED = np.arange(2, 8, dtype=np.int64)
RATIO = 1 / 3
"""Share of the six reused rows that are computed again: two rows."""
WAIT_S = 20.0

APART = ((3.0, 3.0, 2.5, 0.0, 0.0, 2.5), (0.0, 0.0, 2.5, 3.0, 3.0, 2.5))
"""For each rank, how far the cached keys of the reused rows are from the fresh keys. Summed over the heads of both
ranks, the third and the sixth row differ most. On each rank alone, two other rows differ most.
"""
OF_BOTH, OF_FIRST, OF_SECOND = [4, 7], [2, 3], [5, 6]
SAME = ((1.0,) * 6,) * 2
ROUNDING = torch.tensor([0, 0, 0, 0, 0, 1, 1, 0, 0]) * 1e-6
"""Relative differences by which the second rank's sums are larger than the first rank's, as if through rounding. If all
rows are otherwise equal, these differences decide which rows are computed again.
"""


class Group:
    """A group whose ranks are threads."""

    world_size = RANKS

    def __init__(self, rounding: Any = 0.0) -> None:
        self.rank = threading.local()
        self._rounding = rounding
        self._given: dict[int, Any] = {}
        self._barrier = threading.Barrier(RANKS, timeout=WAIT_S)

    def _all(self, given: Any) -> list[Any]:
        self._given[self.rank.number] = given
        self._barrier.wait()
        found = [self._given[rank] for rank in range(RANKS)]
        self._barrier.wait()
        return found

    def all_reduce(self, given: Any) -> Any:
        total = torch.stack(self._all(given)).sum(0)
        if self.rank.number and total.numel() >= ROWS:
            total[:ROWS] += self._rounding
        return total

    def broadcast(self, given: Any, src: int) -> Any:
        return self._all(given)[src]


class Attention(torch.nn.Module):
    num_kv_heads, head_size, kv_cache = 1, WIDTH, None

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_name = f"layer{number}"
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *given: None)

    def forward(self, query: Any, keys: Any, values: Any) -> Any:
        return query


class Layer:
    """A layer whose fresh keys and values are zeros."""

    def __init__(self, number: int) -> None:
        self.self_attn = SimpleNamespace(attn=Attention(number))

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        fresh = torch.zeros(len(hidden), WIDTH)
        self.self_attn.attn(hidden, fresh, fresh)
        return hidden, hidden


class Rows:
    """One rank's cached rows, whose keys have the given norms. The same object is the source and the opened rows."""

    def __init__(self, lengths: tuple[float, ...]) -> None:
        self._keys = torch.zeros(len(lengths), 1, WIDTH)
        self._keys[:, 0, 0] = torch.tensor(lengths)

    def open(self, first: int) -> Rows:
        return self

    def choose(self, chosen: Any) -> None:
        self._keys = self._keys[torch.from_numpy(chosen)]

    def take(self, layer: int) -> Any:
        return self._keys, self._keys

    def close(self, wait: bool = True) -> None:
        """Does nothing, because no copy has begun."""


Keep = Callable[..., list[list[int]]]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Returns a function that runs a forward pass on two ranks and returns, for each rank, which of the reused rows it
    computes again.
    """

    def run(apart: tuple[tuple[float, ...], ...], group: Group) -> list[list[int]]:
        context = SimpleNamespace(slot_mapping={"layer0": torch.arange(ROWS)})
        monkeypatch.setattr(forward, "get_tp_group", lambda: group)
        monkeypatch.setattr(forward, "get_forward_context", lambda: context)
        monkeypatch.setattr(forward, "override_forward_context", lambda context: contextlib.nullcontext())
        monkeypatch.setattr(BlendForward, "_context", lambda self, context, batch, kept: context)
        kept: dict[int, Any] = {}

        def on(rank: int) -> None:
            group.rank.number = rank
            decoder = SimpleNamespace(
                embed_input_ids=lambda ids: ids[:, None].expand(-1, 8).float(),
                layers=[Layer(number) for number in range(LAYERS)],
                norm=lambda hidden, residual: (hidden, residual),
            )
            at = np.arange(ROWS, dtype=np.int64)
            batch = BatchRows(np.array([0, ROWS], np.int64), at, at)
            reused = [ReusedRows(REUSED, Rows(apart[rank]), RATIO)]
            blended = BlendForward(SimpleNamespace(model=decoder), None, CHECK)
            _, kept[rank] = blended.run(torch.arange(ROWS), torch.arange(ROWS), batch, reused)

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(RANKS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(2 * WAIT_S)
        return [REUSED[kept[rank][REUSED]].tolist() for rank in range(RANKS)]

    return run


def test_ranks_keep_the_rows_that_differ_most_over_all_heads(keep: Keep) -> None:
    assert keep(APART, Group()) == [OF_BOTH, OF_BOTH]


def test_control_without_the_sum_over_ranks_they_keep_those_of_the_first_ranks_heads(keep: Keep) -> None:
    class NoSum(Group):
        def all_reduce(self, given: Any) -> Any:
            self._all(given)
            return given

    assert keep(APART, NoSum()) == [OF_FIRST, OF_FIRST]


def test_ranks_whose_sums_are_rounded_otherwise_keep_the_first_ones_rows(keep: Keep) -> None:
    first, second = keep(SAME, Group(ROUNDING))
    assert first == second
    assert first != OF_SECOND


def test_control_without_the_first_ranks_choice_they_keep_different_rows(keep: Keep) -> None:
    class NoBroadcast(Group):
        def broadcast(self, given: Any, src: int) -> Any:
            self._all(given)
            return given

    first, second = keep(SAME, NoBroadcast(ROUNDING))
    assert first != second
    assert second == OF_SECOND
