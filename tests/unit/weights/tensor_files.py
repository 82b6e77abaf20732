"""Small models in safetensors files, and helpers that change single values in them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

HIDDEN = 512
SHAPES = {
    "model.embed_tokens.weight": (4096, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.up_proj.weight": (4 * HIDDEN, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
"""Shapes of the model's tensors, by name: 13 MB of float32 in all."""

WITHIN_S = 60.0


def write_model(folder: Path, name: str = "model.safetensors", seed: int = 0) -> Path:
    """Writes a model with random values into one file. Returns the model's folder."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    write_tensors(
        folder / name,
        {tensor: random.standard_normal(shape).astype(np.float32) for tensor, shape in SHAPES.items()},
    )
    return folder


def write_tensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, values in tensors.items():
        end = at + values.nbytes
        entries[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, end]}
        at = end
    head = json.dumps(entries).encode()
    content = b"".join(values.tobytes() for values in tensors.values())
    file.write_bytes(len(head).to_bytes(8, "little") + head + content)


def place_of(file: Path, tensor: str) -> int:
    """Returns the offset of a tensor's first byte in the file."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    start: int = json.loads(raw[8 : 8 + size])[tensor]["data_offsets"][0]
    return 8 + size + start


def change(file: Path, tensor: str, first: int = 0, values: int = 1) -> None:
    """Overwrites `values` values of a tensor in the file, starting with number `first`. The rest of the file stays the
    same."""
    at = place_of(file, tensor) + 4 * first
    with file.open("r+b") as content:
        content.seek(at)
        content.write(np.full(values, 7.25, np.float32).tobytes())


def settle(folder: Path) -> int:
    """Waits until the file system's clock has advanced. Returns a time, in ns since 1970, that is later than all
    changes before the call and earlier than all changes after it."""
    at_ns = time.time_ns()
    probe = folder / "probe"
    ends_s = time.monotonic() + WITHIN_S
    while True:
        probe.touch()
        os.utime(probe)
        changed_ns = os.stat(probe).st_ctime_ns
        probe.unlink()
        if changed_ns > at_ns:
            return at_ns
        assert time.monotonic() < ends_s, "the file system's clock stands still"
        time.sleep(0.002)
