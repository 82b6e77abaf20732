"""Copies rows between paged memory and torch tensors, without an engine: `python -m examples.torch_layers`.

The tensors are the program's own cache. When the forward pass has computed a layer, the layer's keys and values are
copied from paged memory to this cache. Later, each layer's keys and values are copied from the cache to other blocks
while the next layer is computed. On a GPU the cache is pinned memory, and the copies overlap with the work on the
caller's stream. With torch's CPU device everything runs in sequence.
"""

from __future__ import annotations

import numpy as np
import torch

from flexkv.adapters.torch_tensors.device import TensorRows, TorchDevice
from flexkv.transfer.layerwise.chunks import Chunk, ChunkSet
from flexkv.transfer.layerwise.load import LoadPipeline
from flexkv.transfer.layerwise.paged import PagedLayers
from flexkv.transfer.layerwise.sources import load_layers
from flexkv.transfer.layerwise.store import StorePipeline

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH = 4, 8, 16, 2, 8
TOKENS = 40
WAIT_S = 30.0


def main() -> None:
    where = "cuda" if torch.cuda.is_available() else "cpu"
    device = TorchDevice(where)
    memory = torch.zeros(LAYERS, 2, BLOCKS, BLOCK_TOKENS, HEADS, WIDTH, device=where)
    paged = PagedLayers([list(layer) for layer in memory])
    chunks = ChunkSet([Chunk(0, TOKENS)])
    first, second = np.split(np.random.default_rng(0).permutation(BLOCKS * BLOCK_TOKENS)[: 2 * TOKENS], 2)
    cache = torch.empty(LAYERS, 2, TOKENS, HEADS, WIDTH, pin_memory=where == "cuda")

    steps = StorePipeline(device, paged, first, chunks, WAIT_S).run()
    next(steps)
    for layer in range(LAYERS):
        computed = torch.rand(2, TOKENS, HEADS, WIDTH, device=where)
        memory[layer, :, first // BLOCK_TOKENS, first % BLOCK_TOKENS] = computed
        steps.send([TensorRows(cache[layer])])
    stored = next(steps)
    assert stored is not None
    assert not stored.failed

    report = load_layers(
        LoadPipeline(device, paged, second, chunks, deadline_s=WAIT_S),
        lambda layer: [TensorRows(cache[layer])],
    )
    assert not report.failed
    old, new = (memory[:, :, at // BLOCK_TOKENS, at % BLOCK_TOKENS] for at in (first, second))
    assert old.any()
    assert torch.equal(new, old)
    print(f"{TOKENS} tokens of {LAYERS} layers stored and loaded on torch's {where}")


if __name__ == "__main__":
    main()
