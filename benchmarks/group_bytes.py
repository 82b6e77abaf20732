"""Computes how many bytes flexkv stores for a long prompt of models with several KV groups. The shapes are those of
published models.

vLLM's own code makes the groups, in the pool layout that vLLM uses on a GPU (blocks outermost). flexkv's code decides
which pages are stored at a prompt's boundaries, the positions where a hit may end. `kept` is the stored share of the
bytes of all pages. A slot may hold a page of any group, so it has the size of the largest page; `empty` is the share of
the used slots' bytes that pages leave empty.

    python -m benchmarks.group_bytes [--prompt 32768] [--step 8192] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry, layer_specs, pool_geometry
from flexkv.cache.stores.boundaries import Boundaries, pages_at
from flexkv.facts.keys import Rule

BLOCK_TOKENS = 16
SLOT_ALIGNMENT = 4096


@dataclass(frozen=True)
class Shape:
    """The layers of a model: how many there are of each kind, and their sizes.

    Attributes:
        full, others: number of layers with full attention, and number of layers of the model's second kind. The layers
            with full attention are spread evenly over the model.
        window, chunk: number of tokens to which each of the `others` attends, if they have sliding windows or chunks;
            otherwise 0.
        states: shapes and data types of the recurrent states of each of the `others`; empty if they have no states.
    """

    full: int
    others: int
    kv_heads: int
    head: int
    window: int = 0
    chunk: int = 0
    states: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    def layers(self) -> dict[str, specs.KVCacheSpec]:
        state_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.states)
        token_bytes = 2 * self.kv_heads * self.head * 2
        # As in vLLM, the block of an attention layer has at least as many bytes as a layer's states.
        block = -(-max(state_bytes, BLOCK_TOKENS * token_bytes) // token_bytes // BLOCK_TOKENS) * BLOCK_TOKENS
        plain = {
            "block_size": block,
            "num_kv_heads": self.kv_heads,
            "head_size": self.head,
            "dtype": torch.bfloat16,
        }
        other: specs.KVCacheSpec
        if self.states:
            other = specs.MambaSpec(
                block_size=block,
                shapes=tuple(shape for shape, _ in self.states),
                dtypes=tuple(dtype for _, dtype in self.states),
                page_size_padded=block * token_bytes,
                mamba_cache_mode="align",
            )
        elif self.chunk:
            other = specs.ChunkedLocalAttentionSpec(**plain, attention_chunk_size=self.chunk)
        else:
            other = specs.SlidingWindowSpec(**plain, sliding_window=self.window)
        count = self.full + self.others
        full_at = {count * (n + 1) // self.full - 1 for n in range(self.full)}
        full = specs.FullAttentionSpec(**plain)
        return {f"layer.{n}": full if n in full_at else other for n in range(count)}


MODELS = {
    "Gemma 3 12B": Shape(8, 40, 8, 256, window=1024),
    "Gemma 3 27B": Shape(10, 52, 16, 128, window=1024),
    "GPT-OSS 120B": Shape(18, 18, 8, 64, window=128),
    "Llama 4 Scout": Shape(12, 36, 8, 128, chunk=8192),
    "Qwen3-Next 80B": Shape(
        12, 36, 2, 256, states=(((8192, 3), torch.bfloat16), ((32, 128, 128), torch.float32))
    ),
    "Granite 4.0 H Small": Shape(
        4, 36, 8, 128, states=(((8448, 3), torch.bfloat16), ((128, 64, 128), torch.bfloat16))
    ),
}


@dataclass(frozen=True)
class Group:
    """One KV group of a model, with the size of its pages.

    Attributes:
        image_bytes: bytes of a page, without the padding of the engine's pool.
    """

    geometry: BlockGeometry
    image_bytes: int


def groups_of(shape: Shape) -> tuple[PoolGeometry, list[Group]]:
    """Returns the pool and the groups that vLLM makes for one rank."""
    layout = SimpleNamespace(is_block_outermost=True)
    engine = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        speculative_config=None,
    )
    made = get_kv_cache_groups(engine, shape.layers())
    hashed = min(specs_of.block_size for group in made for specs_of in layer_specs(group))
    config = SimpleNamespace(
        kv_cache_groups=made, num_blocks=1, hash_block_size=hashed, cache_hit_alignment_tokens=None
    )
    geometry = pool_geometry(config)
    return geometry, [Group(group, _image_bytes(made[group.number])) for group in geometry.groups]


def _image_bytes(group: specs.KVCacheGroupSpec) -> int:
    (spec,) = layer_specs(group)
    return len(group.layer_names) * int(spec.real_page_size_bytes)


def boundaries_of(some: Boundaries, prompt: int, step: int) -> Iterator[int]:
    """Yields the lengths at which hits may end in a prompt that the engine computes in steps of up to `step` tokens."""
    if not some.has_states:
        yield from some.between(0, prompt, prompt)
        return
    last, after, computed = some.last_before(prompt - 1), 0, 0
    while computed < last:
        end = min(some.last_before(computed + step), last)
        # Steps end at the end of a block, unless one block takes several steps.
        computed = end if end > computed else computed + step
        if computed == end and some.wants_states(end, after, prompt, 0):
            yield (after := end)


def pages_kept(group: BlockGeometry, boundaries: list[int], prompt: int) -> int:
    if group.rule is Rule.FULL:
        return prompt // group.block_tokens
    return len({page for boundary in boundaries for page in range(*pages_at(group, boundary))})


@dataclass(frozen=True)
class Stored:
    """How much of one prompt of a model is stored.

    Attributes:
        layers: number of layers of each KV group.
        kept: stored share of the bytes of all the prompt's pages.
        empty: share of the used slots' bytes that pages leave empty.
    """

    model: str
    layers: list[int]
    block_tokens: int
    stored_bytes: int
    kept: float
    empty: float


def stored_of(model: str, prompt: int, step: int) -> Stored:
    geometry, groups = groups_of(MODELS[model])
    boundaries = list(
        boundaries_of(Boundaries(geometry.groups, geometry.alignment_tokens, None), prompt, step)
    )
    pages = [pages_kept(group.geometry, boundaries, prompt) for group in groups]
    stored = sum(count * group.image_bytes for count, group in zip(pages, groups, strict=True))
    everything = sum(prompt // group.geometry.block_tokens * group.image_bytes for group in groups)
    slot = -(-max(group.image_bytes for group in groups) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return Stored(
        model,
        [len(group.geometry.layer_names) for group in groups],
        groups[0].geometry.block_tokens,
        stored,
        stored / everything,
        1 - stored / (sum(pages) * slot),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=32768, help="tokens of the prompt")
    parser.add_argument("--step", type=int, default=8192, help="tokens that the engine computes in a step")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    rows = [stored_of(model, arguments.prompt, arguments.step) for model in MODELS]
    table = Table(title=f"a prompt of {arguments.prompt} tokens")
    for column in ("model", "layers by group", "block", "MiB stored", "kept", "empty"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        layers = " ".join(map(str, row.layers))
        mib = f"{row.stored_bytes / 2**20:.0f}"
        table.add_row(row.model, layers, str(row.block_tokens), mib, f"{row.kept:.1%}", f"{row.empty:.1%}")
    Console(width=110).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
