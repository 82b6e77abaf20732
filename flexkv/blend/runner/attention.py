"""Attention of some rows of a prompt over all of the prompt's keys."""

from __future__ import annotations

from typing import Any

import torch


def visible_keys(positions: Any, keys: int) -> Any:
    """The keys that each row may attend to: those at its own position and before, bool [rows, keys].

    Computed rows need not be the last ones. A causal kernel's own mask aligns its last row with the last key, so it
    would let rows attend to later keys.

    Args:
        positions: positions of the rows, int64 [rows]. Key i stands at position i.
    """
    return torch.arange(keys, device=positions.device)[None, :] <= positions[:, None]


def attend(query: Any, keys: Any, values: Any, positions: Any, scale: float) -> Any:
    """Attention of `query` [rows, heads, dim] over `keys` and `values` [kv heads, tokens, dim]: [rows, heads * dim]."""
    rows, heads, _ = query.shape
    groups = heads // keys.shape[0]
    answer = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.repeat_interleave(groups, dim=0)[None],
        values.repeat_interleave(groups, dim=0)[None],
        attn_mask=visible_keys(positions, keys.shape[1])[None, None],
        scale=scale,
    )
    return answer[0].transpose(0, 1).reshape(rows, -1)
