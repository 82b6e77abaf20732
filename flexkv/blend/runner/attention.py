"""Computes attention for some rows of a prompt over all keys of the prompt."""

from __future__ import annotations

from typing import Any

import torch


def visible_keys(positions: Any, keys: int) -> Any:
    """Returns the mask of keys that each row may attend to: those at the row's own position and before, bool [rows,
    keys].

    A causal kernel's own mask would be wrong here: it aligns the last row with the last key, but the computed rows need
    not be the last rows of the prompt, so a row could attend to keys after its position.

    Args:
        positions: positions of the rows, int64 [rows].
        keys: number of keys; key i is at position i.
    """
    return torch.arange(keys, device=positions.device)[None, :] <= positions[:, None]


def attend(query: Any, keys: Any, values: Any, positions: Any, scale: float) -> Any:
    """Returns the attention of some rows over all keys, [rows, heads * dim].

    Args:
        query: the rows' queries, [rows, heads, dim].
        keys, values: the prompt's keys and values, each [KV heads, tokens, dim].
        positions: positions of the rows, int64 [rows].
        scale: factor of the scores.
    """
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
