"""A dynamic rope rescales its frequencies for a long prompt and keeps the new ones for later prompts. Cached keys never
use rescaled frequencies.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexkv.blend import BlendPlan, precompute, prefill  # noqa: E402
from flexkv.blend.runner.model import LayeredModel  # noqa: E402
from tests.unit.blend.blend_world import (  # noqa: E402
    ROUNDING,
    SIZES,
    full,
    make_cache,
    make_model,
    random_segments,
    relative,
    worst_layer,
)

DYNAMIC = {"rope_theta": 10_000.0, "rope_type": "dynamic", "factor": 2.0}
LONGEST = SIZES["max_position_embeddings"]


@pytest.mark.parametrize("length", [20, LONGEST])
def test_a_long_prompt_leaves_no_grown_frequencies_in_cached_keys(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(rope_parameters=DYNAMIC)
    cache = make_cache(model, slots=160, staging_tokens=1024)
    segment, too_long = random_segments([length, 600])
    _, wanted = full(model, [segment])
    # The control: if the segment is part of a long prompt, its keys are different.
    _, long_kv = full(model, [segment, too_long])
    assert relative(long_kv.layers[0].keys[:, :, :length], wanted.layers[0].keys) > 0.01
    assert precompute(model, [too_long], cache) == 0
    assert "600 tokens with a dynamic rope" in caplog.text
    full(model, [too_long])
    assert precompute(model, [segment], cache) == length
    full(model, [too_long])
    grown = model.model.rotary_emb.inv_freq.clone()
    found = prefill(model, [segment], cache, BlendPlan.of_ratio(0.0))
    assert found.report.off == ""
    assert found.report.reused == length
    assert worst_layer(found.kv, wanted) < ROUNDING
    assert torch.equal(model.model.rotary_emb.inv_freq, grown), "the model was left as it was"
    if length == 20:
        full(model, [too_long])
        question = random_segments([7], 3)[0]
        moved = prefill(model, [question, segment], cache, BlendPlan.of_ratio(0.0))
        _, wanted = full(model, [question, segment])
        assert moved.report.reused == length
        assert relative(moved.kv.layers[0].keys, wanted.layers[0].keys) < ROUNDING
    cache.close()


@torch.no_grad()
def test_a_long_prompt_in_between_changes_no_rotation() -> None:
    model = make_model(rope_parameters=DYNAMIC)
    layered = LayeredModel(model)
    frequencies = layered.frequencies.copy()
    keys = torch.randn(2, 2, SIZES["head_dim"], generator=torch.Generator().manual_seed(0))
    # The last position makes the prompt exactly max_positions long. At this length the model does not restore its
    # original frequencies by itself.
    positions = torch.tensor([3, LONGEST - 1])
    wanted = layered.rotated(keys, positions)
    own, _ = model.model.rotary_emb(keys[None], positions[None])
    full(model, random_segments([LONGEST + 1]))
    # The control: after the long prompt, the model itself rotates with other frequencies.
    assert not torch.equal(model.model.rotary_emb(keys[None], positions[None])[0], own)
    np.testing.assert_array_equal(layered.frequencies, frequencies)
    assert torch.equal(layered.rotated(keys, positions), wanted)
