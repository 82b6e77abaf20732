"""Tests blending with every registered model family and every scaling, with all and with none of the reused rows
computed again (ratios 1 and 0). Also tests the conditions under which blending is off for a family.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexkv.blend import BlendPlan, precompute, prefill, registry  # noqa: E402
from flexkv.blend.registry import NotBlendable, rope_of  # noqa: E402
from flexkv.blend.rope import SCALINGS as KNOWN_SCALINGS  # noqa: E402
from flexkv.blend.runner.prefill import off_reason  # noqa: E402
from tests.unit.blend.blend_world import (  # noqa: E402
    FAMILIES,
    ROTARY_SHARE,
    ROUNDING,
    SCALINGS,
    SIZES,
    full,
    make_cache,
    make_model,
    make_scaled,
    random_segments,
    relative,
    worst_layer,
)

LENGTHS = [20, 33, 17, 9]
EACH = pytest.mark.parametrize("family", list(FAMILIES))
EVERY = pytest.mark.parametrize("scaling", list(SCALINGS))


def test_all_families_and_scalings_are_here() -> None:
    assert set(FAMILIES) == set(registry.FAMILIES)
    assert set(SCALINGS) == set(KNOWN_SCALINGS)


@EACH
@EVERY
def test_ratio_1_is_a_full_recompute_wherever_segments_stood(family: str, scaling: str) -> None:
    model = make_scaled(family, scaling)
    cache = make_cache(model)
    segments = random_segments(LENGTHS)
    assert precompute(model, segments[:3], cache) == sum(LENGTHS[:3])
    prompt = [segments[2], segments[0], segments[1], segments[3]]
    logits, kv, report = prefill(model, prompt, cache, BlendPlan.of_ratio(1.0))
    wanted_logits, wanted = full(model, prompt)
    assert report.off == ""
    assert report.reused == 70
    assert relative(logits, wanted_logits) < ROUNDING
    assert worst_layer(kv, wanted) < ROUNDING
    # A key of the first layer depends only on its token and position, so the rotated cached keys are right.
    turned = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))
    assert relative(turned.kv.layers[0].keys, wanted.layers[0].keys) < ROUNDING
    # The control: in later layers, rows depend on the text before them, so the cached rows are far from right.
    assert relative(turned.logits, wanted_logits) > 0.02
    assert worst_layer(turned.kv, wanted) > 0.05
    if scaling == "dynamic":
        with pytest.raises(NotBlendable, match="dynamic"):
            prefill(model, [*prompt, np.zeros(500, np.int64)], cache)
    cache.close()


@EACH
@EVERY
def test_ratio_0_at_unchanged_positions_is_prefix_reuse(family: str, scaling: str) -> None:
    model = make_scaled(family, scaling)
    cache = make_cache(model)
    text, question = random_segments([37, 9])
    precompute(model, [text], cache)
    logits, kv, report = prefill(model, [text, question], cache, BlendPlan.of_ratio(0.0))
    _, prefix = full(model, [text])
    had = [layer.keys.clone() for layer in prefix.layers]
    wanted_logits, wanted_kv = full(model, [question], past=prefix)
    assert [len(rows) for rows in report.computed] == [9] * 4
    assert relative(logits, wanted_logits) < ROUNDING
    assert worst_layer(kv, wanted_kv) < ROUNDING
    for layer, keys in zip(kv.layers, had, strict=True):
        assert torch.equal(layer.keys[:, :, :37], keys)
    # The control: if the cached text begins one token later in the prompt, its rotated keys are very different.
    elsewhere = prefill(model, [[5], text, question], cache, BlendPlan.of_ratio(0.0))
    assert relative(elsewhere.kv.layers[0].keys[:, :, 1:38], had[0]) > 0.1
    cache.close()


@EACH
def test_the_part_of_a_head_that_turns(family: str) -> None:
    spec = rope_of(make_scaled(family, "default").config)
    assert spec.rotary_dim == SIZES["head_dim"] * ROTARY_SHARE.get(family, 1.0)


@EACH
def test_the_other_pairing_turns_a_family_off(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry.FAMILIES[family]
    other = replace(known, pairing="gptj" if known.pairing == "neox" else "neox")
    monkeypatch.setitem(registry.FAMILIES, family, other)
    assert "differ from the model's own" in off_reason(make_model(family))
    monkeypatch.undo()
    assert off_reason(make_model(family)) == ""


@pytest.mark.parametrize("option", ["use_parallel_residual", "qk_layernorm"])
def test_layers_that_do_other_steps_are_refused(option: str) -> None:
    assert option in off_reason(make_model("stablelm", **{option: True}))
