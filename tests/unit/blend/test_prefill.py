"""Compares blended prompts of real transformers models with the results that transformers computes for the same
prompts.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexkv.blend import BlendPlan, Segment, precompute, prefill, split_at_separators  # noqa: E402
from flexkv.blend.registry import NotBlendable  # noqa: E402
from flexkv.blend.runner import attention  # noqa: E402
from flexkv.blend.runner.prefill import off_reason  # noqa: E402
from flexkv.errors import ConfigError, GeometryError  # noqa: E402
from tests.unit.blend.blend_world import (  # noqa: E402
    ROUNDING,
    VOCABULARY,
    full,
    make_cache,
    make_model,
    random_segments,
    relative,
    worst_layer,
)

LENGTHS = [20, 33, 17, 9]


def moved(model, cache, seed: int = 0):
    """Caches three segments, and returns a prompt with them in a different order, so at other positions. The prompt
    ends with a question that is not cached."""
    segments = random_segments(LENGTHS, seed)
    assert precompute(model, segments[:3], cache) == sum(LENGTHS[:3])
    return [segments[2], segments[0], segments[1], segments[3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ratio_1_in_short_dtypes(dtype) -> None:
    model = make_model(dtype=dtype)
    cache = make_cache(model)
    prompt = moved(model, cache)
    logits, kv, _ = prefill(model, prompt, cache, BlendPlan.of_ratio(1.0))
    wanted_logits, wanted_kv = full(model, prompt)
    assert relative(logits, wanted_logits) < 0.1
    assert worst_layer(kv, wanted_kv) < 0.1
    cache.close()


def test_the_error_falls_as_the_ratio_grows(model, cache) -> None:
    ratios = (0.0, 0.25, 0.5, 0.75, 1.0)
    errors = []
    for seed in range(6):
        prompt = moved(model, cache, seed)
        _, wanted = full(model, prompt)
        errors.append(
            [worst_layer(prefill(model, prompt, cache, BlendPlan.of_ratio(r)).kv, wanted) for r in ratios]
        )
    mean = np.mean(errors, axis=0)
    assert (np.diff(mean) < 0).all(), mean


def test_what_differs_most_is_computed(model, cache) -> None:
    """The rows whose cached keys differ most from the true keys are computed again. A check layer compares the cached
    keys with the true keys of that layer.
    """
    prompt = moved(model, cache)
    _, untouched, _ = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))
    _, wanted = full(model, prompt)
    distance = (untouched.layers[1].keys - wanted.layers[1].keys).square().sum(dim=(0, 1, 3))[:70]
    report = prefill(model, prompt, cache, BlendPlan.of_ratio(0.3)).report
    kept = [row for row in report.computed[2].tolist() if row < 70]
    assert len(kept) == 21
    assert set(kept) == set(torch.topk(distance, 21).indices.tolist())


def test_rows_before_the_check_layer_are_right(model, cache) -> None:
    """Rows up to the check layer are right. The prompt has gaps between cached segments: separators, and a segment that
    is not cached.
    """
    segments = random_segments(LENGTHS)
    precompute(model, segments[:2], cache)
    separator = Segment(np.array([3, 5]), reusable=False)
    prompt: list = [segments[1], separator, segments[2], separator, segments[0], segments[3]]
    plan = BlendPlan((2,), (0.2,))
    _, kv, report = prefill(model, prompt, cache, plan)
    _, wanted = full(model, [getattr(s, "tokens", s) for s in prompt])
    for layer in range(2):
        for plane in ("keys", "values"):
            mine, theirs = (getattr(cache.layers[layer], plane) for cache in (kv, wanted))
            assert relative(mine, theirs) < ROUNDING
    # At the check layer, the rows that are selected for computation are right. Rows in gaps are computed in every
    # layer.
    kept = report.computed[2]
    assert relative(kv.layers[2].keys[:, :, kept], wanted.layers[2].keys[:, :, kept]) < ROUNDING
    gaps = [*range(33, 54), *range(74, 83)]
    assert report.reused == 53
    for rows in report.computed:
        assert set(gaps) <= set(rows.tolist())
    assert all(bool((layer.keys[0, :, gaps].abs().sum(dim=(0, 2)) > 0).all()) for layer in kv.layers)


def test_each_check_layer_leaves_fewer_rows_to_compute(model, cache) -> None:
    prompt = moved(model, cache)
    report = prefill(model, prompt, cache, BlendPlan((1, 3), (0.5, 0.1))).report
    assert [len(rows) for rows in report.computed] == [79, 35 + 9, 35 + 9, 7 + 9]
    assert set(report.computed[3]) <= set(report.computed[2])


def test_positions_count_on_from_what_the_engine_has(model, cache) -> None:
    before = random_segments([23], seed=9)
    prompt = moved(model, cache)
    _, past = full(model, before)
    wanted_logits, wanted = full(model, [*before, *prompt])
    had = past.layers[0].keys.clone()
    logits, kv, _ = prefill(model, prompt, cache, BlendPlan.of_ratio(1.0), past=past)
    assert relative(logits, wanted_logits) < ROUNDING
    assert worst_layer(kv, wanted) < ROUNDING
    # A key of the first layer depends only on its token and position, so the rotated cached keys are right in every
    # row.
    _, turned, _ = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0), past=past)
    assert relative(turned.layers[0].keys, wanted.layers[0].keys) < ROUNDING
    assert worst_layer(turned, wanted, slice(0, 23)) < ROUNDING
    assert torch.equal(past.layers[0].keys, had)
    # The control: if the prompt began at position 0, the keys would be far from right.
    _, elsewhere, _ = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))
    assert relative(elsewhere.layers[0].keys, wanted.layers[0].keys[:, :, 23:]) > 0.1


# --- masks ---


def test_no_row_attends_to_a_later_position() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 40, 16, generator=generator) for _ in range(2))
    positions = torch.tensor([0, 3, 4, 17, 30, 39])
    query = torch.randn(6, 4, 16, generator=generator)
    clean = attention.attend(query, keys, values, positions, 0.25)
    for number, position in enumerate(positions.tolist()):
        poisoned_keys, poisoned_values = keys.clone(), values.clone()
        poisoned_keys[:, position + 1 :] = 1e4
        poisoned_values[:, position + 1 :] = 1e4
        found = attention.attend(query, poisoned_keys, poisoned_values, positions, 0.25)
        assert torch.equal(found[: number + 1], clean[: number + 1])
        if number < 5:
            assert not torch.equal(found[-1], clean[-1])


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_poison_in_the_future_reaches_nobody_before(model, cache, ratio: float) -> None:
    """Wrong numbers in the cached pages of a late segment do not change any row before the segment, bit for bit."""
    first, late, question = random_segments([21, 33, 9])
    precompute(model, [first, late], cache)
    prompt = [first, question, late, question]
    clean = prefill(model, prompt, cache, BlendPlan.of_ratio(ratio))
    keys = cache.scheme.keys(late)
    assert cache.manager.forget(0, keys.whole) == 4
    poison = torch.full((2, 33, 16), 1e4)
    assert cache.store(late, lambda layer: (poison, poison), _rotation(model)) == 33
    poisoned = prefill(model, prompt, cache, BlendPlan.of_ratio(ratio))
    for mine, theirs in zip(poisoned.kv.layers, clean.kv.layers, strict=True):
        assert torch.equal(mine.keys[:, :, :30], theirs.keys[:, :, :30])
        assert torch.equal(mine.values[:, :, :30], theirs.values[:, :, :30])
    if ratio == 0.0:
        assert relative(poisoned.logits, clean.logits) > 0.01
    else:
        assert relative(poisoned.logits, clean.logits) < ROUNDING


def _rotation(model):
    from flexkv.blend.runner.blender import Blender
    from flexkv.blend.runner.model import LayeredModel

    return Blender(LayeredModel(model), BlendPlan()).rotation


def test_a_wrong_mask_is_found(model, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the usual mask of a causal kernel, rows in the middle of the prompt attend to later positions,
    and these tests notice it. That mask aligns the last row with the last key.
    """
    first, late, question = random_segments([21, 33, 9])
    precompute(model, [first, late], cache)
    prompt = [first, question, late, question]
    right = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))

    def bottom_right(positions, keys: int):
        rows = len(positions)
        return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)

    monkeypatch.setattr(attention, "visible_keys", bottom_right)
    wrong = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))
    assert worst_layer(wrong.kv, right.kv, slice(21, 30)) > 0.05


# --- the cache ---


def test_the_same_segment_twice_and_leading_blocks(model, cache) -> None:
    text, question = random_segments([24, 9])
    precompute(model, [text], cache)
    longer = np.concatenate([text[:17], [1, 2, 3]])
    report = prefill(model, [text, longer, text, question], cache, BlendPlan.of_ratio(0.0)).report
    assert report.reused == 24 + 16 + 24  # `longer` shares two blocks of 8 with `text`


def test_a_damaged_page_is_computed_again(model, cache) -> None:
    segments = random_segments(LENGTHS)
    precompute(model, segments[:2], cache)
    prompt = [segments[1], segments[0], segments[3]]
    keys = cache.scheme.keys(segments[0])
    match = cache.manager.match("damage", [keys.whole], 0)
    cache.pool.slot(int(match.groups[0].slots[1]))[-5000] ^= 1
    cache.manager.release("damage")
    found = prefill(model, prompt, cache, BlendPlan.of_ratio(0.0))
    (lost,) = found.report.lost
    assert "digest mismatch in run" in lost
    assert lost.startswith("segment 1: ")
    assert found.report.reused == 33
    assert cache.cached_tokens(segments[0]) == 8
    other = make_cache(model)
    precompute(model, segments[1:2], other)
    wanted = prefill(model, prompt, other, BlendPlan.of_ratio(0.0))
    assert relative(found.logits, wanted.logits) < ROUNDING
    other.close()
    # A forgotten segment can be stored again.
    assert precompute(model, segments[:1], cache) == 20
    assert prefill(model, prompt, cache, BlendPlan.of_ratio(0.0)).report.lost == ()


def test_generation_goes_on_from_the_blended_cache(model, cache) -> None:
    prompt = moved(model, cache)
    logits, kv, _ = prefill(model, prompt, cache, BlendPlan.of_ratio(1.0))
    wanted_logits, wanted = full(model, prompt)
    for _ in range(5):
        assert int(logits.argmax()) == int(wanted_logits.argmax())
        token = [np.array([int(logits.argmax())])]
        logits, kv = full(model, token, past=kv)
        wanted_logits, wanted = full(model, token, past=wanted)


# --- invalid calls, and conditions that turn blending off ---


def test_a_model_that_rotates_otherwise_turns_blending_off(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    cache = make_cache(model)
    prompt = random_segments(LENGTHS)
    model.model.rotary_emb.inv_freq.mul_(1.1)
    past = full(model, prompt[:1])[1]
    found = prefill(model, prompt, cache, past=past)
    wanted, wanted_kv = full(model, [prompt[0], *prompt])
    assert "differ from its configuration's" in found.report.off
    assert relative(found.logits, wanted) < ROUNDING
    assert worst_layer(found.kv, wanted_kv) < ROUNDING
    assert precompute(model, prompt, cache) == 0
    assert [r.levelname for r in caplog.records if "blending is off" in r.message] == ["WARNING"]
    cache.close()


def test_a_wrong_pairing_turns_blending_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexkv.blend import registry

    monkeypatch.setitem(registry.FAMILIES, "llama", registry.ModelFamily("llama", "gptj", False))
    assert "differ from the model's own" in off_reason(make_model())
    monkeypatch.undo()
    assert off_reason(make_model()) == ""


def test_what_is_not_blended() -> None:
    with pytest.raises(NotBlendable, match="sliding window"):
        make_cache(make_model("mistral", sliding_window=32))
    window = make_model(
        "qwen2", use_sliding_window=True, sliding_window=32, layer_types=["sliding_attention"] * 4
    )
    with pytest.raises(NotBlendable, match="sliding window"):
        make_cache(window)
    assert "sliding window" in off_reason(window)
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "original_max_position_embeddings": 256,
        "factor": 2.0,
    }
    assert "longrope" in off_reason(make_model(rope_parameters=longrope))


def test_prompts_plans_and_models_that_do_not_fit_are_refused(model, cache) -> None:
    prompt = random_segments(LENGTHS)
    with pytest.raises(ConfigError, match="not one token"):
        prefill(model, [[], []], cache)
    with pytest.raises(ConfigError, match="check layer 4"):
        prefill(model, prompt, cache, BlendPlan((4,), (0.5,)))
    other = make_model("qwen3", num_key_value_heads=4)
    with pytest.raises(GeometryError, match="the cache has"):
        prefill(other, prompt, cache)
    two = model(torch.zeros(2, 5, dtype=torch.int64), use_cache=True).past_key_values
    with pytest.raises(GeometryError, match="batch"):
        prefill(model, prompt, cache, past=two)


def test_a_prompt_cut_at_separators(model, cache) -> None:
    tokens = np.concatenate([*[np.append(s, [95, 96]) for s in random_segments([12, 13], 1)], [1, 2, 3]])
    tokens = np.where(tokens >= VOCABULARY - 2, tokens, tokens % 90)
    segments = split_at_separators(tokens, [95, 96])
    precompute(model, segments[:3], cache)
    found = prefill(model, segments, cache, BlendPlan.of_ratio(0.0))
    assert found.report.reused == 25
    assert found.kv.get_seq_length() == len(tokens)


def test_how_many_layers_are_held_at_once_is_a_setting(model, monkeypatch) -> None:
    monkeypatch.setenv("FLEXKV_LOAD_PREFETCH_LAYERS", "3")
    answers = []
    for asked, held in ((None, 3), (2, 2), (16, 16)):
        cache = make_cache(model, prefetch_layers=asked)
        assert cache.prefetch_layers == held
        logits, _, report = prefill(model, moved(model, cache), cache, BlendPlan.of_ratio(0.3))
        assert report.reused == sum(LENGTHS[:3])
        answers.append(logits)
        cache.close()
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    for bad in ("1", "17", "two"):
        monkeypatch.setenv("FLEXKV_LOAD_PREFETCH_LAYERS", bad)
        with pytest.raises(ConfigError, match="FLEXKV_LOAD_PREFETCH_LAYERS"):
            make_cache(model)
