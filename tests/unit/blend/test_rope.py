"""flexkv computes the same rope frequencies as transformers' models. A key that flexkv rotates equals the key that the
model computes at the new position.
"""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation, RowPlaces
from flexkv.errors import ConfigError
from tests.unit.blend.rope_reference import relative_error

torch = pytest.importorskip("torch")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
configuration = pytest.importorskip("transformers").LlamaConfig

HEAD_DIM, POSITIONS = 128, 8192
YARN: dict = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
LLAMA3: dict = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, tuple[dict, dict]] = {
    "default": ({"rope_type": "default"}, {}),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, {"factor": 4.0, "max_positions": POSITIONS}),
    "yarn": (YARN, {"factor": 8.0, "original_positions": 4096}),
    "yarn-mscale": (
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"factor": 8.0, "original_positions": 4096, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    ),
    "llama3": (LLAMA3, {"factor": 8.0, "original_positions": 8192}),
}


def spec_of(case: str) -> RopeSpec:
    scaling = case.partition("-")[0]
    return RopeSpec(HEAD_DIM, HEAD_DIM, 10_000.0, scaling=scaling, **CASES[case][1])  # type: ignore[arg-type]


def embedding(case: str):
    config = configuration(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_theta": 10_000.0, **CASES[case][0]},
    )
    return llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("case", list(CASES))
def test_frequencies_are_those_of_the_models_own_module(case: str) -> None:
    theirs = embedding(case).inv_freq.double().numpy()
    np.testing.assert_allclose(spec_of(case).frequencies(), theirs, rtol=1e-6)


def test_dynamic_frequencies_beyond_the_models_length() -> None:
    module = embedding("dynamic")
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["dynamic"](module.config, None, seq_len=3 * POSITIONS)
    np.testing.assert_allclose(spec_of("dynamic").frequencies(3 * POSITIONS), theirs.double(), rtol=2e-6)
    assert np.abs(spec_of("dynamic").frequencies() / theirs.double().numpy() - 1).max() > 0.1


@pytest.mark.parametrize("case", list(CASES))
def test_a_turned_key_is_the_key_of_the_new_position(case: str) -> None:
    """If flexkv rotates a key that transformers embedded at an old position, the result equals transformers' embedding
    at the new position. This also holds for ropes with an mscale factor.
    """
    module = embedding(case)
    random = np.random.default_rng(0)
    old, new = random.integers(0, 2000, 64), random.integers(0, 2000, 64)
    plain = torch.randn(1, 2, 64, HEAD_DIM, generator=torch.Generator().manual_seed(0))

    def at(positions):
        cosine, sine = module(plain, torch.from_numpy(positions)[None])
        return llama.apply_rotary_pos_emb(plain, plain, cosine, sine)[1][0].contiguous()

    rotation = KeyRotation(spec_of(case), 2, "float32", module.inv_freq.double().numpy())
    places = RowPlaces(np.arange(64, dtype=np.int64) * HEAD_DIM * 4, 64 * HEAD_DIM * 4)
    keys = at(old)
    rotation.apply(keys, places, keys, places, rotation.table(old, new))
    # The angles in transformers are float32 products of up to 2,000. Their rounding alone causes an error of 6e-5.
    assert relative_error(keys.numpy(), at(new).numpy()) < 2e-4
    assert relative_error(at(old).numpy(), at(new).numpy()) > 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scaling": "longrope"}, "allowed are default"),
        ({"rotary_dim": 7}, "even"),
        ({"rotary_dim": 130}, "even"),
        ({"pairing": "other"}, "neox"),
        ({"theta": 0.0}, "theta"),
        ({"scaling": "yarn"}, "positions"),
    ],
)
def test_a_bad_spec_is_named(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RopeSpec(**{"head_dim": 128, "rotary_dim": 128, "theta": 10_000.0, **arguments})
