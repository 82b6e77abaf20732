"""A decoder with vLLM's interface and paged attention, in plain torch. Tests run blending's self-test on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexkv.adapters.vllm.blend import forward, selftest
from flexkv.adapters.vllm.blend.forward import BlendForward
from flexkv.adapters.vllm.blend.selftest import SelfTest

WIDTH, HEADS, HEAD = 64, 4, 16
BLOCK, BLOCKS = 16, 9
WORDS = 100
FEW = 16
"""If a sequence has fewer query rows than this number, attention sums over the sequence's keys in parts, as kernels for
decoding do. The result is then rounded differently.
"""
PART = 8
"""Number of keys in each part, if attention sums over a sequence's keys in parts."""


@dataclass(frozen=True)
class Context:
    """Stands for vLLM's forward context, from which layers read attention metadata and slots by layer name."""

    attn_metadata: dict[str, Any]
    slot_mapping: dict[str, Any]


in_flight: list[Context] = []
"""Stack of forward contexts. The last one belongs to the running forward pass and overrides those before it."""


class Attention(torch.nn.Module):
    num_kv_heads = num_heads = HEADS
    head_size = HEAD

    def __init__(self, number: int, dtype: Any) -> None:
        super().__init__()
        self.layer_name = f"layer{number}"
        self.kv_cache = torch.zeros(BLOCKS * BLOCK, 2, HEADS, HEAD, dtype=dtype)
        self.impl = SimpleNamespace(do_kv_cache_update=self._write)

    def get_kv_cache_spec(self, config: Any) -> Any:
        return SimpleNamespace(block_size=BLOCK)

    def _write(self, attention: Any, keys: Any, values: Any, pool: Any, slots: Any) -> None:
        pool[slots, 0], pool[slots, 1] = keys.view(-1, HEADS, HEAD), values.view(-1, HEADS, HEAD)

    def forward(self, query: Any, keys: Any, values: Any) -> Any:
        metadata = in_flight[-1].attn_metadata[self.layer_name]
        self._write(self, keys, values, self.kv_cache, metadata.slots)
        out = torch.empty_like(query)
        starts = metadata.runs.starts.tolist()
        for number, length in enumerate(metadata.runs.lengths.tolist()):
            rows = slice(starts[number], starts[number + 1])
            at = torch.arange(length)
            slots = metadata.block_table[number][at // BLOCK].long() * BLOCK + at % BLOCK
            out[rows] = self._attend(query[rows], self.kv_cache[slots], length)
        return out

    def _attend(self, query: Any, cached: Any, length: int) -> Any:
        rows = len(query)
        queries = query.view(rows, HEADS, HEAD).transpose(0, 1)
        keys, values = (cached[:, plane].transpose(0, 1) for plane in (0, 1))
        scores = (queries @ keys.transpose(1, 2)) * HEAD**-0.5
        ahead = torch.arange(length) > torch.arange(length - rows, length)[:, None]
        scores = scores.masked_fill(ahead, -torch.inf)
        if rows >= FEW:
            return (scores.softmax(-1) @ values).transpose(0, 1).reshape(rows, -1)
        out, total = torch.zeros_like(queries), torch.zeros_like(queries[..., :1])
        for part in torch.arange(length).split(PART):
            weights = (scores[..., part] - scores.amax(-1, keepdim=True)).exp()
            out, total = out + weights @ values[:, part], total + weights.sum(-1, keepdim=True)
        return (out / total).transpose(0, 1).reshape(rows, -1)


def _norm(rows: Any) -> Any:
    return torch.nn.functional.rms_norm(rows, (WIDTH,))


class Layer(torch.nn.Module):
    def __init__(self, number: int, dtype: Any, gain: float) -> None:
        super().__init__()
        self.self_attn = SimpleNamespace(attn=Attention(number, dtype))
        random = torch.Generator().manual_seed(number)

        def weight(rows: int, columns: int) -> Any:
            return (torch.randn(rows, columns, generator=random) * gain / columns**0.5).to(dtype)

        self.qkv, self.out = weight(3 * WIDTH, WIDTH), weight(WIDTH, WIDTH)
        self.up, self.down = weight(2 * WIDTH, WIDTH), weight(WIDTH, 2 * WIDTH)

    def forward(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        residual = hidden if residual is None else hidden + residual
        query, keys, values = (_norm(residual) @ self.qkv.T).chunk(3, dim=-1)
        residual = residual + self.self_attn.attn(query, keys, values) @ self.out.T
        return torch.nn.functional.silu(_norm(residual) @ self.up.T) @ self.down.T, residual


class DeepModel:
    """A model in which every layer adds to a residual, so that a rounding error in one layer affects all later layers.

    Args:
        gain: scale of the layers' weights, which determines how much each layer changes a row.
    """

    def __init__(self, layers: int, dtype: Any, gain: float) -> None:
        self.words = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(99)).to(dtype)
        made = [Layer(number, dtype, gain) for number in range(layers)]
        norm = lambda hidden, residual: (_norm(hidden + residual), None)  # noqa: E731
        self.model = SimpleNamespace(layers=made, embed_input_ids=lambda ids: self.words[ids], norm=norm)

    def __call__(self, ids: Any, positions: Any) -> Any:
        hidden, residual = self.model.embed_input_ids(ids), None
        for layer in self.model.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.model.norm(hidden, residual)[0]


def make_test(patch: pytest.MonkeyPatch, model: DeepModel, dtype: Any) -> SelfTest:
    """Makes blending's self-test for a model, with stand-ins for vLLM's forward context and attention metadata."""

    @contextlib.contextmanager
    def override(context: Any) -> Iterator[None]:
        in_flight.append(context)
        yield
        in_flight.pop()

    group = SimpleNamespace(world_size=1)
    patch.setattr(forward, "get_forward_context", lambda: in_flight[-1])
    patch.setattr(forward, "override_forward_context", override)
    patch.setattr(forward, "get_tp_group", lambda: group)
    patch.setattr(selftest, "get_tp_group", lambda: group)
    patch.setattr(
        selftest,
        "set_forward_context",
        lambda metadata, config, slot_mapping, **more: override(Context(metadata, slot_mapping)),
    )
    patch.setattr(
        BlendForward,
        "metadata",
        lambda self, runs, table, slots: SimpleNamespace(runs=runs, block_table=table, slots=slots),
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=512, get_vocab_size=lambda: WORDS, dtype=dtype)
    )
    return SelfTest(model, BlendForward(model, config, 1), config, BLOCKS)
