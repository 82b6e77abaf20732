"""Checks that flexkv rotates keys like the model itself, before any cached key is rotated."""

from __future__ import annotations

import numpy as np
import torch

from flexkv.blend.registry import NotBlendable
from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.blend.runner.model import LayeredModel

ROWS = 64
LONGEST = 4096
"""Upper bound of the positions to test. At higher positions, the errors of the models' own float32 angles exceed
KEY_LIMIT."""
FREQUENCY_LIMIT = 0.01
"""Largest relative error of a frequency. If a model was cast to bfloat16 as a whole, its frequencies are off by 0.4 %.
This does no harm, because flexkv rotates keys by the model's own frequencies."""
KEY_LIMIT = 1e-3
"""Largest relative error of rotated keys. With a wrong pairing or scaling the error is about 1."""


def check_rotation(model: LayeredModel) -> None:
    """Compares the model's frequencies with those of its configuration, and keys that flexkv rotated from one position
    to another with keys that the model itself rotated.

    Raises:
        NotBlendable: frequencies or keys differ by more than the limits. The message says by how much.
    """
    expected, found = model.rope.frequencies(), model.frequencies
    if found.shape != expected.shape:
        raise NotBlendable(f"the model has {len(found)} frequencies, its configuration says {len(expected)}")
    off = float(np.abs(found / expected - 1.0).max())
    if not off <= FREQUENCY_LIMIT:
        raise NotBlendable(f"the model's frequencies differ from its configuration's by up to {off:.2g}")
    random = np.random.default_rng(0)
    longest = min(LONGEST, model.rope.max_positions or LONGEST)
    old, new = random.integers(0, longest, ROWS), random.integers(0, longest, ROWS)
    heads = model.shape.heads
    plain = torch.from_numpy(random.standard_normal((ROWS, heads, model.head_dim)).astype(np.float32))
    keys = model.rotated(plain, torch.from_numpy(old)).contiguous()
    wanted = model.rotated(plain, torch.from_numpy(new))
    rotation = KeyRotation(model.rope, heads, "float32", found)
    head_bytes = rotation.row_bytes // heads
    places = RowPlaces(np.arange(ROWS, dtype=np.int64) * rotation.row_bytes, head_bytes)
    rotation.apply(keys, places, keys, places, rotation.table(old, new))
    error = float((keys - wanted).norm() / wanted.norm())
    if not error <= KEY_LIMIT:
        raise NotBlendable(f"keys turned to other positions differ from the model's own by {error:.2g}")
