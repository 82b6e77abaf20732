"""A blended forward pass keeps at most one layer's keys and values alive. The tests use a minimal model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend import forward
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.forward_rows import TakenRows
from flexkv.adapters.vllm.blend.rows import BatchRows

LAYERS, ROWS = 6, 5


class Attention(torch.nn.Module):
    """An attention layer that records the keys and values that it gets."""

    num_kv_heads, head_size = 2, 4

    def __init__(self, number: int, made: list[Any]) -> None:
        super().__init__()
        self.layer_name, self._made = f"layer{number}", made

    def forward(self, query: Any, keys: Any, values: Any) -> Any:
        self._made += [weakref.ref(keys), weakref.ref(values)]
        return query


class Layer:
    def __init__(self, number: int, made: list[Any]) -> None:
        self.self_attn = SimpleNamespace(attn=Attention(number, made))

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        self.self_attn.attn(hidden, hidden + 1, hidden + 2)
        return hidden + 1, hidden


@pytest.fixture
def made() -> list[Any]:
    return []


@pytest.fixture
def blending(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> BlendForward:
    monkeypatch.setattr(forward, "get_forward_context", lambda: SimpleNamespace())
    monkeypatch.setattr(forward, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(forward, "override_forward_context", lambda context: contextlib.nullcontext())
    decoder = SimpleNamespace(
        embed_input_ids=lambda ids: ids[:, None].expand(-1, 8).float(),
        layers=[Layer(number, made) for number in range(LAYERS)],
        norm=lambda hidden, residual: (hidden, residual),
    )
    return BlendForward(SimpleNamespace(model=decoder), None, check_layer=1)


def most_alive(blending: BlendForward, made: list[Any]) -> int:
    """Returns the largest number of keys and values (tensors of any layer) that are alive at the same time. It counts
    them whenever a layer's rows are taken.
    """
    alive = []

    def take(layer: int, planes: Any) -> None:
        assert planes[0].shape == (ROWS, 2, 4)
        assert bool((planes[1] - planes[0] == 1).all())
        alive.append(sum(each() is not None for each in made))

    rows = np.arange(ROWS, dtype=np.int64)
    batch = BatchRows(np.array([0, ROWS], np.int64), rows, rows)
    blending.run(torch.arange(ROWS), torch.arange(ROWS), batch, [], [TakenRows(rows, take)])
    assert len(alive) == LAYERS
    return max(alive)


def test_no_more_than_one_layers_keys_and_values_are_kept(blending: BlendForward, made: list[Any]) -> None:
    """A forward pass keeps the keys and values (two tensors) of only one layer. On a GPU these are views of the layer's
    complete projection, so keeping them would keep the projection of every row of the batch.
    """
    assert most_alive(blending, made) == 2


def test_control_a_forward_that_drops_none_keeps_all(
    blending: BlendForward, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keeping(dict[int, Any]):
        def clear(self) -> None:
            """Keeps all entries, so that the keys and values of every layer stay alive."""

    @contextlib.contextmanager
    def keeping(layers: Any) -> Iterator[Keeping]:
        kept = Keeping()
        for layer in layers:
            blending.attentions[layer].register_forward_pre_hook(
                lambda _, arguments, layer=layer: kept.update({layer: arguments[1:]})
            )
        yield kept

    monkeypatch.setattr(blending, "_fresh", keeping)
    assert most_alive(blending, made) == 2 * LAYERS
