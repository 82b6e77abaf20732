"""Every field of the installed vLLM's configuration is classified: a field that can change the KV of a block changes
the keys' namespace, and every other field does not.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from safetensors.torch import save_file
from transformers import Idefics3Config, Idefics3VisionConfig, Llama4TextConfig, LlamaConfig
from vllm import envs
from vllm.config.quantization import QuantizationConfigArgs
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from flexkv.adapters.common.identity_table import FieldTable
from flexkv.adapters.common.model_identity import plain_config
from flexkv.adapters.vllm import identity, identity_fields
from flexkv.adapters.vllm.block_keys import RequestNamespaces
from flexkv.adapters.vllm.identity import CRYPTOGRAPHIC_HASHES, _fields, adapter_settings, engine_namespace
from flexkv.adapters.vllm.identity_fields import (
    ENGINE,
    ENVIRONMENT,
    LORA,
    MODEL,
    MULTIMODAL,
    SPECULATIVE,
    TABLES,
    object_at,
)
from flexkv.config import load_config
from flexkv.errors import ConfigError
from tests.identity_page import left_out
from tests.unit.adapters.scheduled_engine import LLAMA
from tests.unit.adapters.test_fingerprint import one_group
from tests.unit.adapters.vllm_objects import lora, make_request

GEOMETRY = one_group(32, 32, 100, ("l.0", "l.1"))
PROCESSOR = "processor_config.json"

VERSION = ".".join(vllm.__version__.split(".")[:2])
ADDED_IN_0_33 = {
    "VllmConfig": ("watchdog_config",),
    "CacheConfig": ("simple_cpu_offload_num_blocks",),
    "AttentionConfig": ("indexer_tp_shard_min_rows", "minimax_m3_indexer_cp", "trtllm_ragged_backend"),
    "KernelConfig": ("monokernel",),
    "SpeculativeConfig": (
        "disable_lookahead_block_hashes",
        "draft_lm_head_quantization",
        "fly_entropy_threshold",
        "fly_entropy_top_k",
        "fly_window_size",
        "xpress_topc",
    ),
}

# --- configurations that vLLM itself resolves ---


def write_weights(folder: Path) -> None:
    """Writes a file whose header gives the dtype of the weights. The file is never loaded."""
    save_file({"weight": torch.arange(4096, dtype=torch.float32)}, folder / "model.safetensors")


def write_image_model(folder: Path) -> Path:
    """Writes the files that vLLM reads to configure a model that takes images. The weights are never loaded."""
    text = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=128)
    vision = Idefics3VisionConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    shape = Idefics3Config(vision_config=vision, text_config=text, image_token_id=100)
    # vLLM imports the model to resolve its configuration. This model needs neither torchvision nor mistral_common.
    shape.architectures = ["Idefics3ForConditionalGeneration"]
    shape.save_pretrained(folder)
    write_weights(folder)
    (folder / PROCESSOR).write_text(json.dumps({"image_processor": {"size": 112}, "chat_template": "a"}))
    return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_weights(folder)
    return folder


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("images"))


def resolved(folder: Path, **arguments: Any) -> Any:
    """Returns the configuration that the engine makes from its arguments."""
    given = {"skip_tokenizer_init": True, "block_size": 32, "max_model_len": 256, "enforce_eager": True}
    return EngineArgs(model=str(folder), **given | arguments).create_engine_config()


@pytest.fixture(scope="module")
def engines(text_folder: Path, image_folder: Path) -> dict[str, Any]:
    """Returns configurations of engines by name. Together they contain every configuration object."""
    return {
        "": resolved(
            image_folder,
            enable_lora=True,
            max_lora_rank=8,
            quantization="online",
            quantization_config={"linear": "fp8_per_tensor_static"},
        ),
        "draft": resolved(
            text_folder,
            speculative_config={
                "model": str(text_folder),
                "num_speculative_tokens": 2,
                "method": "draft_model",
            },
        ),
    }


def namespace(config: Any, **settings: Any) -> bytes:
    return engine_namespace(config, GEOMETRY, load_config(settings, {}))


def of_adapter(config: Any) -> bytes:
    """Returns the namespace of a request with a LoRA adapter. The namespace of the engine itself is constant in this
    function.
    """
    names = RequestNamespaces(bytes(32), adapter_settings(config))
    names._loras = SimpleNamespace(name=lambda path: path)  # type: ignore[assignment]
    return names.of(make_request([1, 2, 3], lora_request=lora("x")))


@pytest.mark.parametrize(("name", "separate"), [("run:0", True), ("content", False)])
def test_an_adapter_that_only_this_run_names_has_its_number_in_the_namespace(
    name: str, separate: bool
) -> None:
    """If an adapter's name is valid only in this run, the adapter's number is part of the namespace too, because the
    adapter's files do not show which content the engine has loaded.
    """
    names = RequestNamespaces(bytes(32), {})
    names._loras = SimpleNamespace(name=lambda path: name)  # type: ignore[assignment]
    first, second, again, in_place = (
        names.of(make_request([1, 2, 3], lora_request=each))
        for each in (
            lora("x", 1),
            lora("x", 2),
            lora("x", 1),
            LoRARequest(lora_name="x", lora_int_id=1, lora_path="/adapters/x", load_inplace=True),
        )
    )
    assert first == again
    assert (first != second) is separate
    assert (first != in_place) is separate


# --- the lists are complete ---

OWN_TABLE = "has a table of its own"
"""The reason that a table gives for leaving out a field that is an object with its own table."""


def class_of(table: FieldTable) -> type:
    """Returns the class in the installed vLLM whose fields this table lists."""
    places = [
        vllm.config,
        *(import_module(f"vllm.config.{name}") for name in ("mamba", "kernel", "quantization")),
    ]
    return next(getattr(place, table.config) for place in places if hasattr(place, table.config))


def unlisted(table: FieldTable, kind: type) -> tuple[list[str], list[str], list[str]]:
    """Returns the fields that are in no list, the listed fields that the class does not have, and the fields that are
    in two lists.
    """
    names, there = [*table.names(), *left_out(table)], [item.name for item in fields(kind)]
    twice = sorted({name for name in names if names.count(name) > 1})
    return sorted(set(there) - set(names)), sorted(set(names) - set(there)), twice


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.config)
def test_every_field_of_the_installed_vllm_is_in_one_list(table: FieldTable) -> None:
    missing, gone, twice = unlisted(table, class_of(table))
    assert not missing, (
        f"new in vLLM: put them into {table.config} in identity_fields.py, or docs/identity.md"
    )
    later = ADDED_IN_0_33.get(table.config, ()) if VERSION == "0.32" else ()
    assert (gone, twice) == (sorted(later), [])


def test_control_a_made_up_field_is_noticed() -> None:
    @dataclass
    class LoadConfig(class_of(identity_fields.LOAD)):  # type: ignore[misc]
        made_up: int = 0

    assert unlisted(identity_fields.LOAD, LoadConfig) == (["made_up"], [], [])


def test_every_object_of_the_engine_has_a_table_or_a_reason() -> None:
    own = {table.path for table in TABLES} - {"", MULTIMODAL.path}
    assert own == set(left_out(ENGINE, OWN_TABLE))


# --- each field changes the key, or does not ---


def another(value: Any) -> Any:
    """Returns a different value of the same kind."""
    if isinstance(value, str) and value in CRYPTOGRAPHIC_HASHES:
        return next(name for name in CRYPTOGRAPHIC_HASHES if name != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next(member for member in type(value) if member is not value)
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, QuantizationConfigArgs):
        return QuantizationConfigArgs(linear="fp8_per_block_static")
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, (list, tuple)):
        return [*value, "other"]
    return f"{value or ''} other".strip()


def varied(config: Any, path: str, name: str) -> Any:
    """Returns the engine's configuration with a different value in one field of the object at `path`."""
    changed = copy.copy(config)
    owner = changed
    for part in filter(None, path.split(".")):
        setattr(owner, part, copy.copy(getattr(owner, part)))
        owner = getattr(owner, part)
    object.__setattr__(owner, name, another(getattr(owner, name)))
    return changed


def whose(table: FieldTable, engines: dict[str, Any]) -> tuple[Any, Callable[[Any], bytes]]:
    """Returns an engine's configuration that contains the table's object, and a function that computes the namespace
    that this object affects.
    """
    return engines["draft" if table is SPECULATIVE else ""], of_adapter if table is LORA else namespace


def wrong_fields(table: FieldTable, engines: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns the fields that should change a key but do not, and the fields that should not change a key but do."""
    config, keys = whose(table, engines)
    assert object_at(config, table.path) is not None
    usual = keys(config)
    assert keys(copy.copy(config)) == usual
    there = {item.name for item in fields(class_of(table))}
    # An object with its own table is left out, because that table compares the object field by field.
    unused = there.intersection(left_out(table)).difference(left_out(table, OWN_TABLE))
    return (
        [
            name
            for name in (*table.taken, *table.read)
            if name in there and keys(varied(config, table.path, name)) == usual
        ],
        [name for name in sorted(unused) if keys(varied(config, table.path, name)) != usual],
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.config)
def test_taken_fields_change_the_keys_and_left_out_ones_do_not(
    table: FieldTable, engines: dict[str, Any]
) -> None:
    assert wrong_fields(table, engines) == ([], [])


def changed_tables(monkeypatch: pytest.MonkeyPatch, table: FieldTable) -> None:
    """Makes the keys depend on this table in place of the current table for the same class."""
    mine = tuple(table if old.config == table.config else old for old in identity_fields.OF_ALL)
    monkeypatch.setattr(identity_fields, "OF_ALL", mine)


def test_control_a_field_that_is_taken_out_of_the_key_is_noticed(
    monkeypatch: pytest.MonkeyPatch, engines: dict[str, Any]
) -> None:
    taken = tuple(name for name in MODEL.taken if name != "quantization_config")
    changed_tables(monkeypatch, FieldTable(MODEL.config, MODEL.path, taken, MODEL.elsewhere))
    assert wrong_fields(MODEL, engines) == (["quantization_config"], [])


def test_control_a_field_that_is_put_into_the_key_is_noticed(
    monkeypatch: pytest.MonkeyPatch, engines: dict[str, Any]
) -> None:
    taken = (*MODEL.taken, "tokenizer")
    changed_tables(monkeypatch, FieldTable(MODEL.config, MODEL.path, taken, MODEL.elsewhere))
    assert wrong_fields(MODEL, engines) == ([], ["tokenizer"])


# --- fields that other code adds to the keys, set through the engine's own arguments ---


def test_one_configuration_has_one_namespace(image_folder: Path) -> None:
    assert namespace(resolved(image_folder)) == namespace(resolved(image_folder))


@pytest.mark.parametrize(
    "arguments",
    [
        {"hf_overrides": {"scale_factor": 4}},
        {"hf_overrides": {"vision_config": {"hidden_act": "gelu"}}},
        {"hf_overrides": {"text_config": {"rope_theta": 5e5}}},
        {"mm_processor_kwargs": {"size": {"height": 56}}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"video_pruning_rate": 0.5},
        {"dtype": "bfloat16"},
        {"load_format": "dummy"},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_an_argument_that_decides_what_an_image_becomes_changes_the_keys(
    image_folder: Path, arguments: dict[str, Any]
) -> None:
    if "dtype" not in arguments:
        arguments = {"dtype": "float32", **arguments}
    assert namespace(resolved(image_folder, **arguments)) != namespace(
        resolved(image_folder, dtype="float32")
    )


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_formats_that_read_other_files_have_other_keys(text_folder: Path, scheme: str) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})

    def keys(load_format: str) -> bytes:
        described = resolved(text_folder, dtype="float16", load_format=load_format)
        return engine_namespace(described, geometry, settings)

    usual = keys("auto")
    same = ["hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor"]
    assert [name for name in same if keys(name) != usual] == []
    # These load formats read other files: *.pt, *.bin, Mistral's file names, and one file per rank.
    others = [keys(name) for name in ("pt", "npcache", "mistral", "sharded_state")]
    assert len({usual, *others}) == 5


@pytest.mark.parametrize(("kv_dtype", "apart"), [("fp8", 3), ("auto", 1)])
def test_attention_backends_are_in_the_keys_of_quantised_kv(
    text_folder: Path, kv_dtype: str, apart: int
) -> None:
    """For quantised KV, the attention backend is part of the keys, because some backends quantise the queries too. For
    other KV it is not: the backends differ only in the order of summation.
    """
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    described = resolved(text_folder, dtype="float16", kv_cache_dtype=kv_dtype)
    found = set()
    for backend in (None, AttentionBackendEnum.FLASHINFER, AttentionBackendEnum.TRITON_ATTN):
        described.attention_config.backend = backend
        found.add(engine_namespace(described, geometry, load_config({}, {})))
    assert len(found) == apart


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_pages_of_an_engine_that_receives_its_weights_are_found_in_one_run(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})

    def in_two_runs(**arguments: Any) -> int:
        described, found = resolved(text_folder, dtype="float16", **arguments), set()
        for run in ("one", "two"):
            monkeypatch.setattr(identity, "RUN", run)
            found.add(engine_namespace(described, geometry, settings))
        return len(found)

    receives: dict[str, Any] = {"weight_transfer_config": {"backend": "nccl"}}
    assert in_two_runs(load_format="dummy", **receives) == 2
    assert in_two_runs(load_format="dummy") == in_two_runs(**receives) == 1, "the controls"


@pytest.mark.parametrize("load_format", ["ipc_cache", "modelexpress"])
@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_weights_of_another_process_need_a_name(text_folder: Path, scheme: str, load_format: str) -> None:
    """If another process supplies the weights, flexkv requires a name for them, because that process may have read
    other files or updated its weights.
    """
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    described = resolved(text_folder, dtype="float16", load_format=load_format)
    with pytest.raises(ConfigError, match=f"{load_format}, with which .* set identity.model"):
        engine_namespace(described, geometry, load_config({"keys.scheme": scheme}, {}))
    named = load_config({"keys.scheme": scheme, "identity.model": "mine"}, {})
    assert engine_namespace(described, geometry, named)


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_auto_reads_mistrals_files_where_they_are_beside_others(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_weights(tmp_path)
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})

    def keys(load_format: str) -> bytes:
        described = resolved(tmp_path, dtype="float16", load_format=load_format)
        return engine_namespace(described, geometry, settings)

    assert keys("auto") == keys("hf") == keys("safetensors")
    save_file({"weight": torch.zeros(4096)}, tmp_path / "consolidated.safetensors")
    assert keys("hf") == keys("safetensors")
    assert keys("auto") != keys("hf")


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_how_fast_a_loader_reads_changes_no_key(text_folder: Path, scheme: str) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})

    def keys(**extra: Any) -> bytes:
        described = resolved(text_folder, dtype="float16", model_loader_extra_config=extra)
        return engine_namespace(described, geometry, settings)

    usual = keys()
    assert keys(enable_multithread_load=True, num_threads=4) == usual
    assert keys(concurrency=16, memory_limit=1 << 30, distributed=True) == usual
    assert keys(pattern="other-{rank}.safetensors") != usual, "the control"


# --- environment variables ---

OTHER_VALUES = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": "1",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_DISABLED_KERNELS": "MarlinLinearKernel",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "1",
    "VLLM_FLOAT32_MATMUL_PRECISION": "medium",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}',
    "VLLM_HUMMING_USE_F16_ACCUM": "1",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_MOE_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
}


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_variables_that_change_kv_are_in_the_keys(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    config, settings = resolved(text_folder, dtype="float16"), load_config({"keys.scheme": scheme}, {})
    found = {"": engine_namespace(config, geometry, settings)}
    for name, value in OTHER_VALUES.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            found[name] = engine_namespace(config, geometry, settings)
    assert len(set(found.values())) == 1 + len(ENVIRONMENT)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    assert engine_namespace(config, geometry, settings) == found[""], "the control"


@pytest.mark.usefixtures("no_variables")
def test_the_listed_defaults_of_variables_are_those_of_vllm() -> None:
    assert {name: getattr(envs, name) for name in ENVIRONMENT} == ENVIRONMENT


# --- Llama 4 ---

TUNED = {"attn_temperature_tuning": True}


@pytest.fixture
def llama_4(tmp_path: Path) -> Path:
    """Writes the files that vLLM reads to configure a Llama 4. The weights are never loaded."""
    shape = Llama4TextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        vocab_size=128,
        max_position_embeddings=1 << 17,
        attention_chunk_size=None,
    )
    shape.architectures = ["Llama4ForCausalLM"]
    shape.save_pretrained(tmp_path)
    write_weights(tmp_path)
    return tmp_path


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_whether_a_llama_4_scales_its_queries_is_in_the_keys(llama_4: Path, scheme: str) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})

    def keys(replaced: bool | None = None, **arguments: Any) -> bytes:
        """Returns the keys' namespace.

        Args:
            replaced: the value with which vLLM's model replaces the configuration's entry; None if it keeps the entry.
        """
        config = resolved(llama_4, dtype="float16", **arguments)
        if replaced is not None:
            config.model_config.hf_config.attn_temperature_tuning = replaced
        return engine_namespace(config, geometry, settings)

    usual, scaled = keys(), keys(max_model_len=32769)
    assert usual != scaled
    assert keys(max_model_len=32768) == usual == keys(replaced=False)
    assert keys(override_generation_config=TUNED) == scaled == keys(replaced=True, max_model_len=40000)
    (llama_4 / "generation_config.json").write_text(json.dumps(TUNED))
    assert keys() == scaled
    assert keys(override_generation_config={"attn_temperature_tuning": False}) == usual


def test_the_configuration_decides_in_the_model_of_transformers(llama_4: Path) -> None:
    engines = [
        resolved(llama_4, model_impl="transformers", hf_overrides={"attn_temperature_tuning": tuned})
        for tuned in (True, False)
    ]
    assert len({namespace(config) for config in engines}) == 2


LEFT_OUT = {
    "gpu_memory_utilization": 0.5,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 512,
    "enforce_eager": False,
    "enable_chunked_prefill": False,
    "served_model_name": "other",
    "tokenizer_revision": "other",
    "num_gpu_blocks_override": 99,
    "max_logprobs": 3,
    "disable_log_stats": True,
    "mm_processor_cache_gb": 1,
    "limit_mm_per_prompt": {"image": 1},
    "max_model_len": 128,
    "generation_config": "vllm",
    "seed": 7,
}


def test_arguments_that_do_not_decide_kv_leave_the_keys(image_folder: Path) -> None:
    assert namespace(resolved(image_folder, **LEFT_OUT)) == namespace(resolved(image_folder))


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str, str], Path]:
    """Returns a function that copies the model and adds a file with the given name and content."""
    made: list[Path] = []

    def copy_with(name: str, content: str) -> Path:
        made.append(write_image_model(tmp_path / f"{len(made)}"))
        if name:
            (made[-1] / name).write_text(content)
        return made[-1]

    return copy_with


def test_the_processors_files_are_in_the_keys_without_the_chat_template(
    copied: Callable[[str, str], Path],
) -> None:
    usual = namespace(resolved(copied("", "")))
    same = {"chat_template": "b", "image_processor": {"size": 112}}
    assert namespace(resolved(copied(PROCESSOR, json.dumps(same, indent=2)))) == usual
    assert namespace(resolved(copied("chat_template.jinja", "c"))) == usual
    assert namespace(resolved(copied("tokenizer_config.json", "{}"))) == usual
    assert namespace(resolved(copied("tekken.json", json.dumps({"vocab": [1], "image": None})))) != usual
    others = [
        namespace(resolved(copied(name, json.dumps({"size": size}))))
        for name in (PROCESSOR, "preprocessor_config.json", "video_preprocessor_config.json")
        for size in (1, 2)
    ]
    assert len({usual, *others}) == 7


def test_files_of_a_text_model_that_none_reads_are_in_no_key(text_folder: Path) -> None:
    usual = namespace(resolved(text_folder))
    extra = [text_folder / name for name in ("preprocessor_config.json", "quantize_config.json", "model.py")]
    try:
        for file in extra:
            file.write_text("{}")
        assert namespace(resolved(text_folder)) == usual
        config = resolved(text_folder)
        config.model_config.trust_remote_code = True
        remote = namespace(config)
        extra[2].write_text("x = 1")
        assert len({usual, remote, namespace(config)}) == 3
    finally:
        for file in extra:
            file.unlink()


def test_the_code_beside_another_configuration_is_in_the_keys(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = resolved(text_folder, hf_config_path=str(tmp_path))
    usual = namespace(config)
    (tmp_path / "model.py").write_text("x = 1")
    assert namespace(config) == usual, "no code of the model's is run"
    config.model_config.trust_remote_code = True
    remote = namespace(config)
    (tmp_path / "model.py").write_text("x = 2")
    assert len({usual, remote, namespace(config)}) == 3


ONLINE: list[dict[str, Any]] = [
    {},
    {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor_static"}},
    {"quantization": "online", "quantization_config": {"linear": "fp8_per_block_static"}},
    {"quantization": "online", "quantization_config": {"linear": {"weight": "mxfp4"}}},
    {
        "quantization": "online",
        "quantization_config": {"linear": "fp8_per_tensor_static", "ignore": ["re:.*qkv_proj.*"]},
    },
    {"quantization": "online", "quantization_config": {"targets": {"re:.*k_proj": "fp8_per_tensor"}}},
    {"quantization": "fp8_per_tensor"},
    {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["re:.*qkv_proj.*"]}},
]


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_every_online_quantisation_has_keys_of_its_own(text_folder: Path, scheme: str) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})
    keys = [
        engine_namespace(resolved(text_folder, dtype="float16", **way), geometry, settings) for way in ONLINE
    ]
    assert len(set(keys)) == len(ONLINE)
    again = resolved(text_folder, dtype="float16", **ONLINE[4])
    assert engine_namespace(again, geometry, settings) == keys[4]


def test_a_file_that_says_how_weights_are_quantised_is_in_the_keys(text_folder: Path) -> None:
    config = resolved(text_folder, **ONLINE[1])
    usual, file = namespace(config), text_folder / "hf_quant_config.json"
    try:
        file.write_text('{"exclude_modules": ["a"]}')
        one = namespace(config)
        file.write_text('{"exclude_modules": ["b"]}')
        assert len({usual, one, namespace(config)}) == 3
    finally:
        file.unlink()


def test_another_version_of_vllm_has_other_keys(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolved(text_folder)
    namespaces = {}
    for version in ("0.31.0", "0.32.0+cu130", "0.32.0", "0.32.1"):
        monkeypatch.setattr("flexkv.adapters.vllm.identity.vllm_version", version)
        namespaces[version] = namespace(config)
    assert namespaces["0.32.0"] == namespaces["0.32.0+cu130"]
    assert len(set(namespaces.values())) == 3


@pytest.mark.parametrize("scheme", ["engine", "common"])
def test_the_version_of_transformers_is_in_the_keys_if_its_code_computes_the_model(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    geometry = one_group(32, 32, 100, ("l.0", "l.1"), "float16")
    settings = load_config({"keys.scheme": scheme}, {})
    native, foreign = (
        resolved(text_folder, dtype="float16", model_impl=implementation)
        for implementation in ("auto", "transformers")
    )
    before = [engine_namespace(config, geometry, settings) for config in (native, foreign)]
    monkeypatch.setattr("flexkv.adapters.vllm.identity.version", lambda package: f"{package} 9")
    after = [engine_namespace(config, geometry, settings) for config in (native, foreign)]
    assert after[0] == before[0], "vLLM's own model"
    assert after[1] != before[1]


def test_the_version_of_transformers_is_in_the_keys_if_it_processes_images(
    image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolved(image_folder)
    before = namespace(config)
    monkeypatch.setattr("flexkv.adapters.vllm.identity.version", lambda package: f"{package} 9")
    assert namespace(config) != before


def test_the_draft_models_own_settings_are_in_the_keys(engines: dict[str, Any], text_folder: Path) -> None:
    config = engines["draft"]
    usual = namespace(config)
    path = "speculative_config.draft_model_config"
    kept = [name for name in MODEL.taken if namespace(varied(config, path, name)) == usual]
    assert not kept
    dummy = copy.copy(config)
    dummy.speculative_config = copy.copy(config.speculative_config)
    dummy.speculative_config.draft_load_config = SimpleNamespace(load_format="dummy")
    assert namespace(dummy) != usual


def test_a_setting_that_was_never_given_does_not_part_engines_that_share(text_folder: Path) -> None:
    """With the common key scheme, engines that share keys are not separated by settings that keep vLLM's default
    values.
    """
    config = resolved(text_folder)
    assert identity_fields.unusual_settings(config) == {}
    config.model_config.model_impl = "transformers"
    assert identity_fields.unusual_settings(config) == {"model_impl": "transformers"}


ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")


def test_no_address_of_this_process_is_in_a_key(engines: dict[str, Any]) -> None:
    settings = load_config({}, {})
    for config in engines.values():
        assert not ADDRESS.search(repr(_fields(config, GEOMETRY, settings)))
    assert ADDRESS.search(repr(object())), "the control"
    assert plain_config({"hook": another}) == {"hook": f"{__name__}.another"}
    assert plain_config({"set": {"b", "a"}}) == {"set": ["a", "b"]}
