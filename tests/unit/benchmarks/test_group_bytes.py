"""`benchmarks.group_bytes` counts how many pages of a long prompt are stored for a model with several KV groups."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.group_bytes import MODELS, boundaries_of, groups_of, pages_kept
from flexkv.cache.stores.boundaries import Boundaries
from flexkv.facts.keys import Rule

PROMPT = 32768
BOUND = 0.35


def kept(checkpoint_tokens: int | None) -> float:
    """Returns which share of all pages of a prompt is stored. The model has five window groups of 1,024 tokens for each
    full group."""
    geometry, groups = groups_of(MODELS["Gemma 3 12B"])
    assert [group.geometry.rule for group in groups] == [Rule.FULL] + [Rule.WINDOW] * 5
    assert len({group.image_bytes for group in groups}) == 1
    boundaries = list(
        boundaries_of(Boundaries(geometry.groups, geometry.alignment_tokens, checkpoint_tokens), PROMPT, 8192)
    )
    pages = [pages_kept(group.geometry, boundaries, PROMPT) for group in groups]
    return sum(pages) / (len(groups) * pages[0])


def test_windows_are_stored_where_a_hit_may_end_alone() -> None:
    assert kept(None) < BOUND
    assert kept(1024) > BOUND, "control: closer checkpoints cost more"
    assert kept(16) == 1.0


def test_states_are_stored_where_steps_end() -> None:
    geometry, _ = groups_of(MODELS["Qwen3-Next 80B"])
    block = geometry.alignment_tokens
    some = Boundaries(geometry.groups, block, None)
    ends = list(boundaries_of(some, PROMPT, 8192))
    assert ends[-1] == (PROMPT - 1) // block * block
    assert all(end % block == 0 for end in ends)
    assert all(later - end >= some.checkpoint_tokens for end, later in pairwise(ends[:-1]))
