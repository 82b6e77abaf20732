"""Every fact that changes the KV changes the namespace. No other fact changes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexkv.adapters.vllm.identity import engine_namespace, engine_weights
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.config import load_config
from flexkv.errors import KeySchemeError
from flexkv.weights.files import NAMED, WeightsContent


def one_group(block_tokens: int, *more: Any) -> PoolGeometry:
    return PoolGeometry((BlockGeometry(block_tokens, *more),), block_tokens)


GEOMETRY = one_group(16, 16, 100, ("l.0", "l.1"))
FLOAT16 = one_group(16, 16, 100, ("l.0", "l.1"), "float16")


class TextConfig:
    def __init__(self, **fields: Any) -> None:
        self.fields = {
            "hidden_size": 64,
            "rope_parameters": {"rope_theta": 1e4},
            "_name_or_path": "x",
        } | fields

    def to_dict(self) -> dict[str, Any]:
        return self.fields


def config(folder: Path, **changes: Any) -> Any:
    values = {
        "model": str(folder),
        "revision": None,
        "seed": 0,
        "dtype": torch.float16,
        "quantization": None,
        "cache_dtype": "auto",
        "hash": "sha256",
        "load_format": "auto",
        "draft": None,
        "skipped": [],
        "commit": None,
        "text": TextConfig(),
        "config_path": None,
        "max_tokens": 4096,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=values["model"],
            hf_overrides={},
            revision=values["revision"],
            seed=values["seed"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_text_config=values["text"],
            hf_config_path=values["config_path"],
            max_model_len=values["max_tokens"],
            hf_config=SimpleNamespace(_commit_hash=values["commit"]),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"],
            prefix_caching_hash_algo=values["hash"],
            kv_cache_dtype_skip_layers=values["skipped"],
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        speculative_config=values["draft"],
    )


def ngram(method: str = "ngram") -> Any:
    return SimpleNamespace(method=method, model=None, draft_model_config=None, kv_cache_dtype=None)


def draft(folder: Path, content: bytes = b"d", text: TextConfig | None = None, **changes: Any) -> Any:
    """Makes a speculative configuration whose draft model has its own weights."""
    place = folder / f"draft-{content.hex()}"
    place.mkdir(exist_ok=True)
    (place / "pytorch_model.bin").write_bytes(content * 5000)
    model = config(place, text=text or TextConfig()).model_config
    fields = {"method": "eagle", "model": "draft", "draft_model_config": model, "kv_cache_dtype": None}
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(range(256)) * 64)
    return tmp_path


def namespace(folder: Path, geometry: PoolGeometry = GEOMETRY, extra: Any = None, **changes: Any) -> bytes:
    return engine_namespace(config(folder, **changes), geometry, load_config(extra or {}, {}))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e4m3"},
        {"geometry": one_group(16, 16, 100, ("l.0", "l.1"), "float16+uint8")},
        {"hash": "sha256_cbor"},
        {"draft": ngram()},
        {"skipped": ["0"]},
        {"text": TextConfig(rope_parameters={"rope_theta": 5e5})},
        {"extra": {"identity.namespace": "b"}},
        {"extra": {"identity.model": "v2"}},
        {"geometry": one_group(32, 32, 100, ("l.0", "l.1"))},
        {"geometry": one_group(16, 16, 100, ("l.0",))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_the_kv_changes_the_namespace(folder: Path, changes: dict) -> None:
    assert namespace(folder, **changes) != namespace(folder)


def test_every_type_of_kv_has_keys_of_its_own(folder: Path) -> None:
    """Each type of KV has its own keys. For some of these types the pages have the same size, so only the keys
    distinguish them.
    """
    ways: list[dict[str, Any]] = [
        {"cache_dtype": dtype, "skipped": skipped}
        for dtype in (
            "auto",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8_per_token_head",
            "int8_per_token_head",
            "nvfp4",
        )
        for skipped in ([], ["0"], ["1"], ["sliding_window"])
    ]
    ways += [
        {"geometry": one_group(16, 16, 100, ("l.0", "l.1"), dtypes)}
        for dtypes in ("float16+uint8", "bfloat16+uint8", "uint8")
    ]
    assert len({namespace(folder, **way) for way in ways}) == len(ways)
    assert namespace(folder, FLOAT16) == namespace(folder), "the model's own type is no other"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
        {"rope_parameters": {"full": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}},
    ],
)
def test_the_longest_request_decides_the_factors_of_long_rope(folder: Path, rope: dict[str, Any]) -> None:
    """With long RoPE, the longest possible request determines the namespace. If it exceeds the model's original
    context, vLLM uses the long factors for all positions.
    """
    text = TextConfig(**rope)
    short, long = (namespace(folder, text=text, max_tokens=tokens) for tokens in (4096, 4097))
    assert short != long
    assert namespace(folder, text=text, max_tokens=100) == short
    assert namespace(folder, text=text, max_tokens=131072) == long
    assert namespace(folder, max_tokens=100) == namespace(folder, max_tokens=131072)


def test_long_rope_that_does_not_say_its_first_length_is_apart_by_the_longest_request(folder: Path) -> None:
    text = TextConfig(rope_parameters={"rope_type": "longrope"})
    assert namespace(folder, text=text, max_tokens=100) != namespace(folder, text=text, max_tokens=200)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_dynamic_rope_is_apart_by_the_longest_request(folder: Path, name: str) -> None:
    """Some models scale dynamic RoPE by `max_model_len`. With default RoPE, `max_model_len` changes no key."""
    dynamic, default = (
        TextConfig(**{name: {"rope_type": kind, "factor": 2.0}}) for kind in ("dynamic", "default")
    )
    spaces = {tokens: namespace(folder, text=dynamic, max_tokens=tokens) for tokens in (100, 200)}
    assert spaces[100] != spaces[200]
    assert namespace(folder, text=default, max_tokens=100) == namespace(folder, text=default, max_tokens=200)


def test_where_the_model_was_read_from_does_not_count(folder: Path) -> None:
    assert namespace(folder, text=TextConfig(_name_or_path="y")) == namespace(folder)
    assert namespace(folder, geometry=one_group(16, 16, 7, ("l.0", "l.1"))) == namespace(folder)


def test_random_weights_are_told_apart_by_their_seed(folder: Path) -> None:
    assert namespace(folder, load_format="dummy") != namespace(folder, load_format="dummy", seed=1)
    assert namespace(folder) == namespace(folder, seed=1)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_a_hash_that_can_be_forged_is_refused(folder: Path, algorithm: str) -> None:
    with pytest.raises(KeySchemeError, match=r"--prefix-caching-hash-algo .*sha256"):
        namespace(folder, hash=algorithm)


def test_a_draft_model_is_told_apart_by_its_weights_and_shape(folder: Path) -> None:
    one = namespace(folder, draft=draft(folder))
    assert namespace(folder, draft=draft(folder)) == one
    others = [
        draft(folder, b"e"),
        draft(folder, text=TextConfig(hidden_size=32)),
        draft(folder, method="mtp"),
        draft(folder, kv_cache_dtype="fp8"),
        ngram(),
        ngram("suffix"),
    ]
    assert len({one, namespace(folder), *(namespace(folder, draft=other) for other in others)}) == 8


def content(folder: Path, extra: Any = None, **changes: Any) -> WeightsContent:
    return engine_weights(config(folder, **changes), load_config(extra or {}, {}))


def test_weights_that_samples_name_are_read_whole(folder: Path) -> None:
    eagle = draft(folder)
    place = eagle.draft_model_config.model
    assert content(folder).paths == (str(folder),)
    assert content(folder, draft=ngram()).paths == (str(folder),)
    assert content(folder, draft=eagle).paths == (str(folder), place)
    # With `identity.model` the user names the main model, but not the draft model.
    named = {"identity.model": "v2"}
    assert content(folder, extra=named) == NAMED
    assert content(folder, extra=named, draft=eagle).paths == (place,)
    inside = SimpleNamespace(draft_model_config=config(folder).model_config)
    assert content(folder, draft=inside).paths == (str(folder),)
    assert content(folder, extra=named, draft=inside) == NAMED


def test_weights_that_a_commit_or_a_seed_names_are_not_read(folder: Path) -> None:
    assert content(folder, load_format="dummy") == NAMED
    hub: dict[str, Any] = {"model": "owner/name", "revision": "main"}
    assert content(folder, **hub, commit="a" * 40) == NAMED
    assert "owner/name@main, which may move" in content(folder, **hub).unnamed


def test_a_branch_of_the_hub_is_told_apart_by_its_commit(folder: Path) -> None:
    hub: dict[str, Any] = {"model": "owner/name", "revision": "main"}
    assert namespace(folder, **hub, commit="a" * 40) != namespace(folder, **hub, commit="b" * 40)
    assert namespace(folder, **hub, commit="a" * 40) == namespace(folder, **hub, commit="a" * 40)
    # A folder is identified by its content, even if a commit was resolved.
    assert namespace(folder, commit="a" * 40) == namespace(folder)


def test_the_commit_of_another_repositorys_configuration_does_not_identify_weights(folder: Path) -> None:
    hub: dict[str, Any] = {"model": "owner/name", "commit": "c" * 40}
    other = hub | {"config_path": "owner/other"}
    assert namespace(folder, **other, revision="a" * 40) != namespace(folder, **other, revision="b" * 40)
    assert content(folder, **other, revision="a" * 40) == NAMED
    assert "owner/name@default, which may move" in content(folder, **other).unnamed
    assert content(folder, **hub, config_path="owner/name") == NAMED, "the control"


@pytest.mark.parametrize(
    ("load", "model", "place"),
    [
        (
            {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a/b"}},
            {},
            "s3://a/b",
        ),
        ({"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_dir": "/a"}}, {}, "/a"),
        (
            {"load_format": "auto"},
            {"text_model_id": "owner/text", "audio_model_id": "owner/ear"},
            "owner/text, owner/ear",
        ),
    ],
)
def test_weights_that_vllm_reads_elsewhere_are_not_identified_by_the_models_own(
    folder: Path, load: dict[str, Any], model: dict[str, Any], place: str
) -> None:
    engine = config(folder)
    assert not engine_weights(engine, load_config({}, {})).unnamed, "the control"
    engine.load_config = SimpleNamespace(**load)
    for entry, name in model.items():
        setattr(engine.model_config.hf_config, entry, name)
    assert (
        f"some of the weights come from {place}, which" in engine_weights(engine, load_config({}, {})).unnamed
    )
    assert engine_weights(engine, load_config({"identity.model": "mine"}, {})) == NAMED


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_batch_invariant_kernels_have_keys_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    extra = {"keys.scheme": scheme}
    usual = namespace(folder, geometry=FLOAT16, extra=extra)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    exact = namespace(folder, geometry=FLOAT16, extra=extra)
    assert exact != usual
    assert namespace(folder, geometry=FLOAT16, extra=extra) == exact
    dummies = {namespace(folder, geometry=FLOAT16, extra=extra, load_format="dummy", seed=n) for n in (0, 1)}
    assert len(dummies | {exact}) == 3
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert namespace(folder, geometry=FLOAT16, extra=extra) == usual, "the control"
