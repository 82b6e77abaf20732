"""Tests the arguments that flexkv refuses, with the reasons, and the pool's geometry. flexkv reads the geometry from
the tensor and checks it against the arguments.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv.adapters.tensorrt_llm import FlexKVScheduler, api
from flexkv.adapters.tensorrt_llm.arguments import EngineArguments
from flexkv.adapters.tensorrt_llm.geometry import geometry_of_layout, geometry_of_pool
from flexkv.adapters.tensorrt_llm.identity import engine_namespace, engine_weights, request_namespace
from flexkv.adapters.tensorrt_llm.identity_fields import ARGUMENTS
from flexkv.config import load_config
from flexkv.errors import ConfigError, GeometryError
from flexkv.layout.format_id import Interior
from flexkv.weights.files import NAMED, WeightsContent
from tests.identity_page import left_out
from tests.unit.tensorrt_llm.pool import HostTensor, Pool, Shape, layout_of
from tests.unit.tensorrt_llm.world import arguments

LLAMA = {
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "head_dim": 8,
}
REFUSED = "refused, or allowed only as far as the runtime itself allows it with a connector"
"""The reason that docs/identity.md gives for arguments that no engine with a connector can have."""

LATENT = {"num_hidden_layers": 3, "num_attention_heads": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 2}


def model(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_damaged_configuration_of_the_model_is_named(tmp_path: Path) -> None:
    path = model(tmp_path, **LLAMA)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA)[:-1])
    with pytest.raises(ConfigError, match=r"config\.json is no JSON"):
        EngineArguments.of(arguments(model=path))


def pool(blocks: int = 5, layers: int = 3, kv: int = 2, elements: int = 2 * 4 * 8) -> HostTensor:
    return HostTensor(np.zeros((blocks, layers, kv, elements), np.float16))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"context_parallel_size": 2}, "context_parallel_size is 2"),
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"cache": {"host_cache_size": 1 << 30}}, "host_cache_size"),
        ({"cache": {"dtype": "nvfp4"}}, "block scales"),
        ({"cache": {"max_attention_window": [512, 4096]}}, "each window has a pool"),
        ({"sparse_attention_config": SimpleNamespace(algorithm="dsa")}, "indexer keys"),
    ],
)
def test_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineArguments.of(arguments(**given))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"num_key_value_heads": [4, 4, 2]}, "each count has a pool"),
        (LLAMA | {"hybrid_override_pattern": "M-M*"}, "recurrent layers"),
        (LATENT | {"index_topk": 2048}, "indexer keys"),
    ],
)
def test_models_that_are_not_served_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineArguments.of(arguments(model=model(tmp_path, **config)))


def test_partial_reuse_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    EngineArguments.of(arguments(cache={"enable_partial_reuse": True}))
    assert "enable_partial_reuse" in caplog.text


def test_geometry_comes_from_the_tensor(tmp_path: Path) -> None:
    given = EngineArguments.of(arguments(ranks=2, model=model(tmp_path, **LLAMA)))
    found = geometry_of_pool(pool(), given)
    assert (found.block_tokens, found.view.num_blocks, found.replicas) == (4, 5, 1)
    assert found.format_id.interior is Interior.KV_SPLIT_HND
    assert found.format_id.ranks == 2
    assert found.view.stripe_bytes == 3 * 2 * 64 * 2
    assert len(found.view.segments) == 1, "a block is one run"


def test_latent_blocks_have_64_tokens_whatever_the_arguments_say(tmp_path: Path) -> None:
    given = EngineArguments.of(arguments(tokens=32, model=model(tmp_path, **LATENT)))
    found = geometry_of_pool(pool(kv=1, elements=64 * 8), given)
    assert (found.block_tokens, found.format_id.interior) == (64, Interior.LATENT)
    with pytest.raises(GeometryError, match="are not 64 tokens"):
        geometry_of_pool(pool(kv=1, elements=32 * 8), given)


@pytest.mark.parametrize(
    ("tensor", "error", "said"),
    [
        (pool(elements=2 * 8 * 8), GeometryError, "tokens"),
        (pool(layers=2), ConfigError, "other pools hold the rest"),
        (pool(kv=1), ConfigError, "one latent"),
        (HostTensor(np.zeros((5, 3, 64), np.float16)), GeometryError, "shape"),
        (HostTensor(np.zeros((5, 3, 2, 128), np.float16)[..., ::2]), GeometryError, "stride"),
    ],
)
def test_a_pool_that_is_not_what_the_arguments_say(
    tmp_path: Path, tensor: Any, error: type[Exception], said: str
) -> None:
    given = EngineArguments.of(arguments(ranks=2, model=model(tmp_path, **LLAMA)))
    with pytest.raises(error, match=said):
        geometry_of_pool(tensor, given)


def test_a_layout_gives_the_same_pages() -> None:
    numbers = Pool(Shape(), 0)
    given = EngineArguments.of(arguments())
    one, other = geometry_of_pool(numbers.tensor, given), geometry_of_layout(layout_of(numbers), given)
    assert one.format_id == other.format_id
    assert one.view.stripe_bytes == other.view.stripe_bytes


def test_layouts_are_refused() -> None:
    numbers, given = Pool(Shape(), 0), EngineArguments.of(arguments())
    with pytest.raises(GeometryError, match="2 layer groups"):
        geometry_of_layout(layout_of(numbers, groups=2), given)
    with pytest.raises(GeometryError, match="attention window"):
        geometry_of_layout(layout_of(numbers, window=512), given)
    scheduler = FlexKVScheduler(arguments())
    try:
        with pytest.raises(GeometryError, match="2 layer groups"):
            scheduler.request_finished_by_layer_group(SimpleNamespace(request_id=1), [[1], [2]])
        with pytest.raises(GeometryError, match="2 layer groups"):
            scheduler.update_state_after_alloc_by_layer_group(SimpleNamespace(request_id=1), [[1], [2]])
    finally:
        scheduler.shutdown()


def test_other_roles_stay_opaque() -> None:
    """A region that contains a buffer with an unknown role is copied as a whole. Its bytes are never converted to
    another engine's order.
    """
    layout = layout_of(Pool(Shape(), 0))
    for buffer in layout.groups[0].regions[0].buffers[:1]:
        buffer.role = "index_key"
    found = geometry_of_layout(layout, EngineArguments.of(arguments()))
    assert found.format_id.interior is Interior.OPAQUE


def test_what_changes_kv_changes_the_namespace() -> None:
    settings = load_config({"identity.model": "m"}, {})
    given = EngineArguments.of(arguments())
    engine = engine_namespace(given, settings, 4)
    others = [
        engine_namespace(given, settings, 8),
        engine_namespace(given, load_config({"identity.model": "n"}, {}), 4),
        engine_namespace(EngineArguments.of(arguments(cache={"dtype": "fp8"})), settings, 4),
    ]
    names = [
        request_namespace(engine, SimpleNamespace(cache_salt_id=salt, lora_task_id=adapter))
        for salt in (None, 0, 1)
        for adapter in (None, 0, 1)
    ]
    assert names[0] == engine
    assert len({*names, *others}) == len(names) + len(others)
    assert request_namespace(engine, SimpleNamespace(multimodal_hashes=[[1]])) is None


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_windows_and_random_weights_change_the_namespace(scheme: str) -> None:
    """Attention windows and random weights change the keys' namespace. A layer's KV depends on the tokens to which the
    layers before it attend.
    """
    settings = load_config({"identity.model": "m", "keys.scheme": scheme}, {})

    def keys(**given: Any) -> bytes:
        return engine_namespace(EngineArguments.of(arguments(**given)), settings, 4, "float16")

    others = [
        keys(cache={"max_attention_window": [512]}),
        keys(cache={"max_attention_window": [1024]}),
        keys(cache={"sink_token_length": 4}),
        keys(load_format="dummy"),
    ]
    assert len({keys(), *others}) == 5
    # The control: a list with the same window for each of several layers means one window for all.
    assert keys(cache={"max_attention_window": [512, 512]}) == others[0]
    assert keys(cache={"max_attention_window": None}) == keys()
    assert keys(cache={"max_attention_window": [512]}, max_seq_len=512) == keys(max_seq_len=512)


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_kernels_and_files_change_the_namespace(tmp_path: Path, scheme: str) -> None:
    """The kernels for quantised weights and the files that the engine reads change the keys' namespace. With quantised
    weights, some kernels also quantise their inputs.
    """
    settings = load_config({"identity.model": "m", "keys.scheme": scheme}, {})
    folder = model(tmp_path, **LLAMA)

    def keys(algorithm: str | None = "NVFP4", **given: Any) -> bytes:
        given = {"model": folder, "quant_config": SimpleNamespace(quant_algo=algorithm)} | given
        return engine_namespace(EngineArguments.of(arguments(**given)), settings, 4, "float16")

    def experts(**given: Any) -> SimpleNamespace:
        return SimpleNamespace(**{"backend": "AUTO", "use_low_precision_moe_combine": False} | given)

    found = [
        keys(),
        keys(moe_config=experts(backend="MARLIN")),
        keys(moe_config=experts(use_low_precision_moe_combine=True)),
        keys(nvfp4_gemm_config="marlin"),
        keys(checkpoint_format="mistral"),
        keys(load_format="vision_only"),
    ]
    (tmp_path / "model.py").write_text("x = 1")
    found.append(keys(trust_remote_code=True))
    (tmp_path / "hf_quant_config.json").write_text('{"exclude_modules": ["a"]}')
    found.append(keys())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("cache", "quantised", "apart"), [("fp8", None, 2), ("auto", "FP8", 2), ("auto", None, 1)]
)
def test_attention_backends_are_in_the_keys_of_quantised_kv(
    cache: str, quantised: str | None, apart: int
) -> None:
    """For quantised KV, the attention backend is part of the keys, because some backends quantise the queries too. For
    other KV it is not: the backends differ only in the order of summation.
    """
    settings = load_config({"identity.model": "m"}, {})
    given: dict[str, Any] = {
        "cache": {"dtype": cache},
        "quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo=quantised),
    }
    engines = [EngineArguments.of(arguments(attn_backend=name, **given)) for name in ("TRTLLM", "FLASHINFER")]
    assert len({engine_namespace(engine, settings, 4) for engine in engines}) == apart


def test_kernels_of_weights_that_are_not_quantised_are_not_in_common_keys() -> None:
    settings = load_config({"identity.model": "m", "keys.scheme": "common"}, {})

    def keys(**given: Any) -> bytes:
        return engine_namespace(EngineArguments.of(arguments(**given)), settings, 4, "float16")

    usual = keys()
    assert keys(moe_config=SimpleNamespace(backend="CUTLASS"), checkpoint_format="HF") == usual
    assert keys(moe_config=SimpleNamespace(backend="CUTLASS"), checkpoint_format="mistral") != usual, (
        "the control"
    )


def test_every_argument_that_the_connector_gets_is_in_one_list() -> None:
    names = [*ARGUMENTS.names(), *left_out(ARGUMENTS)]
    assert len(set(names)) == len(names)
    assert set(vars(arguments())) <= set(names)
    assert not {*vars(arguments()), "made_up"} <= set(names), "the control"


def test_taken_arguments_change_the_namespace_and_left_out_ones_do_not() -> None:
    settings = load_config({"identity.model": "m"}, {})

    def keys(**given: Any) -> bytes:
        return engine_namespace(EngineArguments.of(arguments(**given)), settings, 4)

    usual = keys()
    assert keys() == usual
    in_key = dict.fromkeys(ARGUMENTS.taken, "other") | {
        "model_kwargs": {"rope_theta": 5e5},
        "dtype": "bfloat16",
        "quant_config": SimpleNamespace(quant_algo="FP8"),
        "speculative_config": "draft",
        "load_format": "dummy",
        "moe_config": SimpleNamespace(backend="CUTLASS", max_num_tokens=1),
        "cache": {"dtype": "fp8"},
    }
    others = [keys(**{name: value}) for name, value in in_key.items()]
    assert len({usual, *others}) == len(others) + 1
    unused = set(left_out(ARGUMENTS)) - set(left_out(ARGUMENTS, REFUSED))
    assert unused != set(left_out(ARGUMENTS)), "the page has a row of refused arguments"
    assert [name for name in sorted(unused) if keys(**{name: 7}) != usual] == []
    assert keys(moe_config=SimpleNamespace(backend=None, max_num_tokens=9)) == usual


def test_a_format_that_reads_other_files_has_other_keys() -> None:
    class LoadFormat(Enum):
        AUTO = 0
        VISION_ONLY = 2

    def keys(load_format: Any) -> bytes:
        given = EngineArguments.of(arguments(load_format=load_format))
        return engine_namespace(given, load_config({"identity.model": "m"}, {}), 4)

    assert keys("auto") == keys(LoadFormat.AUTO) == keys(None)
    assert keys("vision_only") == keys(LoadFormat.VISION_ONLY) != keys("auto")


def test_files_of_quantisation_and_code_are_in_the_namespace(tmp_path: Path) -> None:
    settings = load_config({"identity.model": "m"}, {})
    path = model(tmp_path, **LLAMA)

    def keys(**given: Any) -> bytes:
        return engine_namespace(EngineArguments.of(arguments(model=path, **given)), settings, 4)

    usual = keys()
    (tmp_path / "model.py").write_text("x = 1")
    assert keys() == usual, "nobody reads it"
    with_code = keys(trust_remote_code=True)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"exclude_modules": ["a"]}}')
    assert len({usual, with_code, keys()}) == 3


def test_another_version_of_the_engine_has_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, given = load_config({"identity.model": "m"}, {}), EngineArguments.of(arguments())
    usual = engine_namespace(given, settings, 4)
    monkeypatch.setattr("flexkv.adapters.tensorrt_llm.identity.engine_version", lambda: "1.3.0")
    assert engine_namespace(given, settings, 4) != usual


@pytest.mark.parametrize("name", ["speculative_model", "speculative_model_dir"])
def test_a_draft_models_content_is_in_the_namespace(tmp_path: Path, name: str) -> None:
    settings = load_config({"identity.model": "m"}, {})
    draft = tmp_path / "draft"
    draft.mkdir()
    given = arguments()
    given.speculative_config = SimpleNamespace(**{name: str(draft)})
    names = set()
    for content in (b"one", b"two"):
        (draft / "model.bin").write_bytes(content)
        drafted = EngineArguments.of(given)
        names.add(engine_namespace(drafted, settings, 4))
        assert engine_weights(drafted, settings) == WeightsContent((str(draft),))
    assert len(names) == 2
    given.speculative_config = SimpleNamespace(**{name: "owner/draft"})
    assert (
        "owner/draft@default, which may move" in engine_weights(EngineArguments.of(given), settings).unnamed
    )


def test_the_models_content_is_read_where_nothing_names_it(tmp_path: Path) -> None:
    place = model(tmp_path, **LLAMA)
    given, settings = EngineArguments.of(arguments(model=place)), load_config({}, {})
    assert engine_weights(given, settings) == WeightsContent((place,))
    assert engine_weights(given, load_config({"identity.model": "m"}, {})) == NAMED


def test_it_imports_without_the_package() -> None:
    if api.find_api() is None:
        assert api.WorkerBase is api.BareWorker
    else:
        assert api.WorkerBase is api.find_api().KvCacheConnectorWorker
