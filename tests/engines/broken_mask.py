"""A control for tests of blending: attention treats the kept rows of a request as one causal sequence, although rows
between them are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def one_sequence_of(runs: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Joins the kept rows of each request into one causal sequence. Most of them then attend to later positions, too.

    Args:
        runs: see `BlendForward.runs`.
    """
    from flexkv.adapters.vllm.blend.rows import Runs

    def broken(batch: Any, kept: Any) -> Runs:
        found = runs(batch, kept)
        begin = np.flatnonzero(np.concatenate(([True], np.diff(found.sequences) != 0)))
        ends = np.append(begin[1:], len(found.sequences)) - 1
        starts = np.append(found.starts[begin], found.starts[-1]).astype(np.int32)
        return Runs(starts, found.lengths[ends], found.sequences[begin])

    return broken
