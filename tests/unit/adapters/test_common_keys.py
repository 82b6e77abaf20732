"""With the common key scheme, all engines derive the same key from the same KV. If the tokens do not determine the KV,
a block gets no key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flexkv.adapters.common.common_keys import SharedModel, common_namespace
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.identity import engine_namespace as namespace_of_tensorrt_llm
from flexkv.adapters.vllm.engine_spec import EngineRole, EngineSpec, with_possible_modes
from flexkv.adapters.vllm.identity import engine_namespace as namespace_of_vllm
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.cache.keys import EngineKeyChain
from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.facts.keys import Rule
from tests.unit.adapters.mini_engine import NAMESPACE, MiniEngine
from tests.unit.adapters.test_fingerprint import TextConfig, config, ngram
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, embeddings, image, lora, make_request
from tests.unit.tensorrt_llm.world import arguments

PROMPT = list(range(100, 123))
COMMON = {"keys.scheme": "common"}


def one_group(block_tokens: int, *more: Any) -> PoolGeometry:
    return PoolGeometry((BlockGeometry(block_tokens, *more),), block_tokens)


GEOMETRY = one_group(16, 16, 100, ("l.0",), "float16")
WINDOW = BlockGeometry(16, 16, 100, ("l.1",), "float16", number=1, rule=Rule.WINDOW, reach=4)
Make = Callable[..., MiniEngine]


def keys_by_hand(tokens: list[int], seed: bytes = b"") -> np.ndarray:
    """Returns the index keys of SGLang's chain of page hashes, computed with hashlib."""
    chain, prior = EngineKeyChain(NAMESPACE, 0), seed
    for block in range(len(tokens) // BLOCK_TOKENS):
        content = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        prior = hashlib.sha256(prior + np.array(content, "<u4").tobytes()).digest()
        chain.extend([prior], start=block)
    return chain.keys


def test_keys_are_those_of_sglangs_chain(make_engine: Make) -> None:
    engine = make_engine(**COMMON)
    request = make_request(PROMPT, "one")
    engine.run(request)
    tracker = engine.side.requests.of(request)
    np.testing.assert_array_equal(tracker.block_keys.keys(), keys_by_hand(PROMPT))
    assert len(engine.unit.manager.hub.index.find(0, keys_by_hand(PROMPT))) == 5
    assert not np.array_equal(keys_by_hand(PROMPT), MiniEngine.keys_of(request))


def test_a_salt_is_sglangs_seed(make_engine: Make) -> None:
    engine = make_engine(**COMMON)
    request = make_request(PROMPT, "one", cache_salt="tenant")
    label = b"sglang-cache-namespace-v1"
    seed = hashlib.sha256(label + b"\x00\x01" + len(b"tenant").to_bytes(8, "little") + b"tenant").digest()
    np.testing.assert_array_equal(
        engine.side.requests.of(request).block_keys.keys(), keys_by_hand(PROMPT, seed)
    )


def test_keys_grow_with_the_request_and_follow_a_session_that_takes_tokens_back(make_engine: Make) -> None:
    engine = make_engine(**COMMON)
    request = make_request(PROMPT[:6], "one")
    tracker = engine.side.requests.of(request)
    assert len(tracker.block_keys.keys()) == 1
    request.append_output_token_ids([7, 8, 9])
    np.testing.assert_array_equal(tracker.block_keys.keys(), keys_by_hand([*PROMPT[:6], 7, 8, 9]))
    other = make_request([*PROMPT[:5], 70, 80, 90], "one")
    tracker.block_keys.request = other
    np.testing.assert_array_equal(tracker.block_keys.keys(), keys_by_hand([*PROMPT[:5], 70, 80, 90]))


def test_a_session_that_takes_an_image_later_has_no_keys_from_there_on(make_engine: Make) -> None:
    """If an image enters a streaming session, the blocks from the image on get no keys. vLLM appends the session's
    images to the list that the request has had from the beginning.
    """
    engine = make_engine(**COMMON)
    request = make_request(PROMPT[:8], "one")
    tracker = engine.side.requests.of(request)
    assert len(tracker.block_keys.keys()) == 2
    request.mm_features.append(image("cat", 8, 3))
    request.append_output_token_ids(PROMPT[8:16])
    np.testing.assert_array_equal(tracker.block_keys.keys(), keys_by_hand(PROMPT[:8]))


def test_tenants_are_apart_and_what_tokens_do_not_name_is_not_cached(
    make_engine: Make, tmp_path: Path
) -> None:
    engine = make_engine(**COMMON, **{"store.partial_blocks": True})
    apart = [
        lambda name: make_request(PROMPT, name),
        lambda name: make_request(PROMPT, name, cache_salt="a"),
        lambda name: make_request(PROMPT, name, cache_salt="b"),
        lambda name: make_request(PROMPT, name, lora_request=lora("x", 1, str(tmp_path / "x"))),
        lambda name: make_request(PROMPT, name, lora_request=lora("x", 1, str(tmp_path / "y"))),
    ]
    unnamed = [
        lambda name: make_request(PROMPT, name, mm_features=[image("cat", 1, 2), image("dog", 8, 3)]),
        lambda name: make_request(prompt_embeds=embeddings(1, 23), name=name),
    ]
    for number, make in enumerate([*apart, *unnamed]):
        assert engine.run(make(f"first{number}")) == 0, number
        engine.forget()
    for number, make in enumerate([*apart, *unnamed]):
        assert engine.run(make(f"second{number}")) == (22 if number < len(apart) else 0), number
        engine.forget()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(range(256)) * 64)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": 10000.0}))
    return tmp_path


def vllm(folder: Path, geometry: PoolGeometry = GEOMETRY, settings: Any = None, **changes: Any) -> bytes:
    overrides = changes.pop("overrides", {})
    described = config(folder, **changes)
    described.model_config.hf_overrides = overrides
    return namespace_of_vllm(described, geometry, load_config(COMMON | (settings or {}), {}))


def test_engines_of_one_model_have_one_namespace(folder: Path) -> None:
    settings = load_config(COMMON, {})
    other = EngineArguments.of(arguments(model=str(folder)))
    assert namespace_of_tensorrt_llm(other, settings, 16, "float16") == vllm(folder)
    # The namespace depends neither on the names that the engine gives to its layers nor on the number of blocks in its
    # pool.
    assert vllm(folder, one_group(16, 16, 7, ("a", "b"), "float16")) == vllm(folder)
    # Keys of the engines' own key schemes are in other namespaces.
    engine = load_config({}, {})
    assert namespace_of_vllm(config(folder), GEOMETRY, engine) != vllm(folder)
    assert namespace_of_tensorrt_llm(other, engine, 16, "float16") not in (
        namespace_of_vllm(config(folder), GEOMETRY, engine),
        vllm(folder),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "awq"},
        {"overrides": {"rope_theta": 5e5}},
        {"geometry": one_group(32, 32, 100, ("l.0",), "float16")},
        {"geometry": one_group(16, 16, 100, ("l.0",), "bfloat16"), "dtype": torch.bfloat16},
        {"settings": {"identity.namespace": "mine"}},
        {"settings": {"identity.model": "v2"}},
        {"load_format": "dummy"},
    ],
)
def test_what_changes_the_kv_changes_the_namespace(folder: Path, changes: dict[str, Any]) -> None:
    assert vllm(folder, **changes) != vllm(folder)


def test_the_models_file_and_weights_are_in_it(folder: Path) -> None:
    before = vllm(folder)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "rope_theta": 20000.0}))
    other_file = vllm(folder)
    (folder / "pytorch_model.bin").write_bytes(bytes(255 - i for i in range(256)) * 64)
    assert len({before, other_file, vllm(folder)}) == 3


@pytest.mark.parametrize("content", [b'{"hidden_size": 64', b"\xff{}"])
def test_a_damaged_configuration_of_the_model_is_named(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        vllm(folder)


def test_a_commit_is_the_same_by_hub_name_and_by_folder() -> None:
    settings = load_config(COMMON, {})
    commit = "c" * 40
    by_name = SharedModel("org/model", f"hub:org/model@{commit}", "float16", "None", 16)
    by_folder = SharedModel(f"/cache/snapshots/{commit}", f"commit:{commit}", "float16", "None", 16)
    assert common_namespace(by_name, settings) == common_namespace(by_folder, settings)


def test_two_quantisations_in_one_commit_are_two_models() -> None:
    settings = load_config(COMMON, {})
    commit = "c" * 40
    names = [f"hub:org/model{which}@{commit}" for which in ("", ":Q4_K_M", ":Q8_0", "/sub/x.gguf")]
    names += [f"commit:{commit}/x-Q4_K_M.gguf", f"commit:{commit}/x-Q8_0.gguf"]
    made = {
        common_namespace(SharedModel("org/model", weights, "float16", "gguf", 16), settings)
        for weights in names
    }
    assert len(made) == len(names)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"geometry": one_group(16, 16, 100, ("l.0",), "uint8"), "dtype": torch.uint8}, "without scales"),
        ({"geometry": one_group(16, 16, 100, ("l.0",), "bfloat16")}, "must be the same"),
        ({"geometry": PoolGeometry((*GEOMETRY.groups, WINDOW), 16)}, "KV groups are full, window;"),
        ({"geometry": PoolGeometry((WINDOW,), 16)}, "KV groups are window;"),
        ({"draft": ngram()}, "speculative decoding"),
        ({"settings": {"store.mode": "lazy"}}, "store.mode=eager"),
        ({"overrides": lambda given: given}, "is a function"),
        ({"model": "org/model"}, "which may move"),
        ({"config_path": "/elsewhere"}, "hf_config_path=/elsewhere"),
        ({"text": TextConfig(rope_scaling={"type": "su"})}, "longrope"),
        ({"overrides": {"rope_parameters": {"rope_type": "longrope"}}}, "longrope"),
    ],
)
def test_engines_whose_pages_others_could_not_use_are_refused(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        vllm(folder, **changes)


@pytest.mark.parametrize("hashes", [False, True])
def test_lazy_stores_that_become_eager_for_want_of_hashes_have_common_keys(
    folder: Path, make_engine: Make, hashes: bool
) -> None:
    described = config(folder)
    described.cache_config.enable_prefix_caching = hashes
    described.scheduler_config = SimpleNamespace(async_scheduling=True, max_num_batched_tokens=16)
    described.kv_events_config = None
    described.parallel_config = SimpleNamespace(data_parallel_index=0, tensor_parallel_size=1)
    asked = load_config(COMMON | {"store.mode": "lazy"}, {})
    settings = with_possible_modes(asked, described)
    if hashes:  # the control: stores stay lazy, which common keys do not allow
        with pytest.raises(ConfigError, match="needs store"):
            EngineSpec.of(described, GEOMETRY, settings, EngineRole())
        return
    spec = EngineSpec.of(described, GEOMETRY, settings, EngineRole())
    assert spec.config.store.mode == "eager"
    assert spec.namespace == vllm(folder)
    engine = make_engine(**COMMON, **{"store.mode": spec.config.store.mode})
    engine.run(make_request(PROMPT, "one"))
    assert len(engine.unit.manager.hub.index.find(0, keys_by_hand(PROMPT))) == 5


def test_the_models_own_path_as_that_of_its_configuration_changes_nothing(folder: Path) -> None:
    assert vllm(folder, config_path=str(folder)) == vllm(folder)


def test_what_tensorrt_llm_changes_in_the_models_configuration_is_in_it(folder: Path) -> None:
    changed = EngineArguments.of(arguments(model=str(folder), model_kwargs={"rope_theta": 5e5}))
    plain = EngineArguments.of(arguments(model=str(folder), model_kwargs=None))
    for settings in (load_config(COMMON, {}), load_config({}, {})):
        one, other = (namespace_of_tensorrt_llm(of, settings, 16, "float16") for of in (plain, changed))
        assert one != other
    assert namespace_of_tensorrt_llm(changed, load_config(COMMON, {}), 16, "float16") == vllm(
        folder, overrides={"rope_theta": 5e5}
    )


def test_long_rope_is_refused_of_tensorrt_llm(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"rope_scaling": {"type": "longrope"}}))
    given = EngineArguments.of(arguments(model=str(folder)))
    with pytest.raises(ConfigError, match="longrope"):
        namespace_of_tensorrt_llm(given, load_config(COMMON, {}), 16, "float16")
