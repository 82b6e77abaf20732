"""A second, slow implementation of the rotation in float64. Tests compare flexkv's rotation with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.blend.rope import RopeSpec


def to_bfloat16(values: NDArray) -> NDArray[np.uint16]:
    """Rounds float32 values to the nearest bfloat16, and ties to even. Returns the bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: NDArray, dtype: str) -> NDArray:
    if dtype == "bfloat16":
        return to_bfloat16(values)
    return values.astype(dtype)


def decode(values: NDArray, dtype: str) -> NDArray[np.float64]:
    return (from_bfloat16(values) if dtype == "bfloat16" else values).astype(np.float64)


def turned(keys: NDArray, spec: RopeSpec, positions: NDArray, frequencies: NDArray) -> NDArray[np.float64]:
    """Applies the rotary embedding of `positions` [rows] to `keys` [rows, heads, head_dim]. With negated positions it
    removes the embedding."""
    angles = positions[:, None, None] * frequencies
    cosine, sine = np.cos(angles), np.sin(angles)
    answer = keys.astype(np.float64)
    half = spec.rotary_dim // 2
    if spec.pairing == "neox":
        first, second = slice(0, half), slice(half, spec.rotary_dim)
    else:
        first, second = slice(0, spec.rotary_dim, 2), slice(1, spec.rotary_dim, 2)
    x, y = answer[..., first].copy(), answer[..., second].copy()
    answer[..., first] = x * cosine - y * sine
    answer[..., second] = y * cosine + x * sine
    return answer


def relative_error(found: NDArray, wanted: NDArray) -> float:
    """Returns the relative error of the complete array, in the Euclidean norm."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
