"""Shows which engines and models flexkv refuses at their start, and the wording of the refusals."""

from __future__ import annotations

import gc
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import attention, mla_attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from flexkv.adapters.vllm.engine_checks import (
    check_batch_invariance,
    check_engine,
    check_groups,
    check_model,
    check_parallelism,
)
from flexkv.adapters.vllm.engine_spec import with_possible_modes
from flexkv.adapters.vllm.local_engines import end_registration, register_only
from flexkv.adapters.vllm.pool_geometry import BlockGeometry, PoolGeometry
from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.facts.keys import Rule

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


def parallel(**fields: Any) -> Any:
    sizes = dict.fromkeys(
        (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        1,
    )
    others = {"distributed_executor_backend": "mp", "enable_fault_tolerance": False}
    return SimpleNamespace(**{**sizes, **others, **fields})


class Model(SimpleNamespace):
    """Stands for a model's configuration. vLLM decides from its attributes whether it caches prefixes."""

    is_diffusion = ModelConfig.is_diffusion
    is_prefix_caching_supported = ModelConfig.is_prefix_caching_supported


def model(
    attention: str = "decoder", pooling: tuple[str | None, str | None] | None = None, **config: Any
) -> Any:
    """Makes a model's configuration.

    Args:
        pooling: the types of the poolers for sequences and for tokens. None for a model that generates text.
    """
    pooler = pooling and SimpleNamespace(seq_pooling_type=pooling[0], tok_pooling_type=pooling[1])
    hf_config = SimpleNamespace(**config)
    return Model(model="some/model", attn_type=attention, pooler_config=pooler, hf_config=hf_config)


@pytest.mark.parametrize(
    "name", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_ranks_that_split_layers_or_tokens_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 2"):
        check_parallelism(parallel(**{name: 2}))


def test_ranks_that_reach_no_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"external_launcher.*tensor_parallel_size 2.*'mp' or 'ray'"):
        check_parallelism(parallel(tensor_parallel_size=2, distributed_executor_backend="external_launcher"))
    check_parallelism(parallel(tensor_parallel_size=2))
    check_parallelism(parallel(distributed_executor_backend="external_launcher"))


def test_engines_that_go_on_after_a_fault_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave --enable-fault-tolerance out"):
        check_parallelism(parallel(enable_fault_tolerance=True))


@pytest.mark.parametrize(
    ("attention", "pooling", "kind"),
    [
        ("decoder", ("MEAN", None), "decoder attention, MEAN pooling"),
        ("decoder", ("CLS", None), "decoder attention, CLS pooling"),
        ("decoder", ("LAST", "STEP"), "decoder attention, LAST and STEP pooling"),
        ("encoder_only", ("LAST", None), "encoder_only attention, LAST pooling"),
        ("encoder_decoder", None, "encoder_decoder attention"),
        ("attention_free", None, "attention_free attention"),
    ],
)
def test_a_model_that_vllm_cannot_compute_in_parts_is_refused(
    attention: str, pooling: tuple[str | None, str | None] | None, kind: str
) -> None:
    with pytest.raises(ConfigError, match=rf"prefix caching for some/model \({kind}\)"):
        check_model(model(attention, pooling))


@pytest.mark.parametrize(
    ("attention", "pooling"), [("decoder", None), ("decoder", ("LAST", "ALL")), ("hybrid", None)]
)
def test_other_models_are_not(attention: str, pooling: tuple[str | None, str | None] | None) -> None:
    check_engine(SimpleNamespace(parallel_config=parallel(), model_config=model(attention, pooling)))


def test_a_diffusion_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="some/model is a diffusion model"):
        check_model(model(canvas_length=256))


def test_a_second_connector_in_one_engine_is_refused() -> None:
    engine: Any = SimpleNamespace(cache_config=SimpleNamespace())
    child: Any = SimpleNamespace(cache_config=engine.cache_config)
    first, scheduler, other = Named(), Named(), Other()
    register_only(first, WORKER, engine)
    register_only(scheduler, SCHEDULER, engine)
    with pytest.raises(ConfigError, match=r"\(Named, then Other\).*connectors"):
        register_only(other, WORKER, child)
    end_registration(first)
    register_only(other, WORKER, child)
    with pytest.raises(ConfigError):
        register_only(Other(), SCHEDULER, child)


class Named:
    """Stands for a connector that the engine's configuration names."""


class Other(Named):
    """Stands for a connector of another class."""


def test_engines_in_one_process_do_not_refuse_each_other() -> None:
    connectors = [Named() for _ in range(2)]
    for connector in connectors:
        register_only(connector, SCHEDULER, SimpleNamespace(cache_config=SimpleNamespace()))  # type: ignore[arg-type]


def test_a_connector_that_is_gone_is_not_counted() -> None:
    engine: Any = SimpleNamespace(cache_config=SimpleNamespace())
    kept = Named()
    register_only(kept, SCHEDULER, engine)
    with pytest.raises(ConfigError):  # the control: the engine is refused
        register_only(Named(), SCHEDULER, engine)
    del kept
    gc.collect()
    register_only(Named(), SCHEDULER, engine)


class Layer(AttentionLayerBase):
    """Stands for an attention layer of which flexkv reads only the backend."""

    def __init__(self, backend: type[Any]) -> None:
        self.backend = backend

    def get_attn_backend(self) -> Any:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


@pytest.mark.parametrize("name", ["FLASHINFER", "TRITON_MLA", "TRITON_ATTN"])
@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_backend_without_prefix_caching_in_batch_invariant_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    """In batch-invariant mode, flexkv refuses attention backends for which vLLM itself turns prefix caching off. The
    test also checks in vLLM's source that vLLM does this. As a control, without the mode or with another backend,
    flexkv does not refuse the engine.
    """
    condition = inspect.getsource(attention), inspect.getsource(mla_attention)
    assert all(
        ('"TRITON_MLA"' in source and "enable_prefix_caching = False" in source) for source in condition
    )
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", mode)
    backend = type("Backend", (), {"get_name": staticmethod(lambda: name)})
    layers = {"l.0": Layer(backend), "l.1": object()}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    if mode == "1" and name != "TRITON_ATTN":
        with pytest.raises(
            ConfigError, match=f"VLLM_BATCH_INVARIANT is set and the attention backend is {name}"
        ):
            check_batch_invariance(config)
    else:
        check_batch_invariance(config)


ONE = BlockGeometry(16, 16, 100, ("full",))
WINDOW = BlockGeometry(16, 16, 100, ("window",), rule=Rule.WINDOW, reach=4, number=1)


def test_speculative_decoding_with_several_groups_is_refused() -> None:
    drafts: Any = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle"))
    check_groups(drafts, PoolGeometry((ONE,), 16))
    check_groups(SimpleNamespace(speculative_config=None), PoolGeometry((ONE, WINDOW), 16))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"speculative decoding \(eagle\) with 2 KV cache groups"):
        check_groups(drafts, PoolGeometry((ONE, WINDOW), 16))


@pytest.mark.parametrize("mode", ["sync", "layerwise"])
def test_several_groups_have_async_loads_and_eager_stores(mode: str) -> None:
    asked = load_config({"load.mode": mode, "store.mode": "layerwise" if mode == "layerwise" else "lazy"}, {})
    had = with_possible_modes(asked, SimpleNamespace(), is_hybrid=True)  # type: ignore[arg-type]
    assert (had.load.mode, had.store.mode) == ("async", "eager")
