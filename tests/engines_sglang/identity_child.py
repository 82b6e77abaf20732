"""Finds which of SGLang's arguments change the namespace of flexkv's keys. Uses SGLang's own classes for arguments and
models.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import EnvJSON, envs
from sglang.srt.server_args import ServerArgs

from flexkv.adapters.common.framed import plain_namespace
from flexkv.adapters.common.identity_table import FieldTable
from flexkv.adapters.sglang import identity
from flexkv.adapters.sglang.identity_fields import ARGUMENTS, ENVIRONMENT, OTHER_WEIGHTS
from flexkv.config import load_config
from flexkv.errors import GeometryError
from tests.identity_page import left_out

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": LLAMA,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_attention_heads": 2},
    "image_token_index": 100,
}
OTHER_VALUES = {"ep_dispatch_algorithm": "fake"}
"""For some arguments, a value that changes the key, because not every other value of them does."""
PLACE = identity.Place("dp0.pp0of1.tp0of1", 1, True)
POOL: Any = SimpleNamespace(layers=2, block_tokens=16)


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "pytorch_model.bin").write_bytes(bytes(range(256)) * 64)
    return folder


def attention(arguments: Any, model: Any) -> dict[str, int]:
    """Returns how many different keys three attention backends have, for each dtype of KV."""
    found = {}
    for dtype in ("torch.float8_e4m3fn", "torch.uint8, fp8_e4m3", "torch.bfloat16"):
        given = [_with(arguments, attention_backend=name) for name in ("fa3", "triton", "flashinfer")]
        found[dtype] = len({plain_namespace(fields_of(one, model, dtype)) for one in given})
    return found


def fields_of(arguments: Any, model: Any, kv_dtype: str) -> dict[str, Any]:
    return identity._fields(arguments, model, POOL, PLACE, load_config({}, {}), kv_dtype)


def namespace(arguments: Any, model: Any, name: str = "") -> str:
    settings = load_config({"identity.model": name} if name else {}, {})
    fields = identity._fields(arguments, model, POOL, PLACE, settings, "torch.float32")
    return plain_namespace(fields).hex()


def another(value: Any) -> Any:
    """Returns a different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, dict):
        return {**value, "other": 1}
    if isinstance(value, (list, tuple)):
        return [*value, "other"]
    return f"{value or ''} other".strip()


def wrong_fields(table: FieldTable, arguments: Any, model: Any) -> dict[str, list[str]]:
    """Finds errors in a table of arguments: arguments that should change the key but do not, and arguments that should
    not change it but do.
    """
    usual = namespace(arguments, model)

    def changes(name: str) -> bool:
        changed = copy.copy(arguments)
        setattr(changed, name, OTHER_VALUES.get(name, another(getattr(arguments, name))))
        return namespace(changed, model) != usual

    return {
        "taken in vain": [name for name in (*table.taken, *table.read) if not changes(name)],
        "left out in vain": [name for name in left_out(table) if changes(name)],
    }


def unlisted(names: list[str], table: FieldTable) -> dict[str, list[str]]:
    listed = [*table.names(), *left_out(table)]
    return {
        "missing": sorted(set(names) - set(listed)),
        "gone": sorted(set(listed) - set(names)),
        "twice": sorted({name for name in listed if listed.count(name) > 1}),
    }


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    fields = list(ServerArgs.__struct_fields__)
    yield "lists", unlisted(fields, ARGUMENTS)
    yield "places", places()
    yield "control: a made-up argument", unlisted([*fields, "made_up"], ARGUMENTS)
    with tempfile.TemporaryDirectory() as place, patch.object(identity, "get_lora", _no_adapters):
        yield from _keys(Path(place))


def places() -> dict[str, Any]:
    """Returns the names of places (a rank's position in the engine) that differ only in the heads or layers in the
    rank's pages. For heads: the second of four ranks, with and without data parallelism of the attention. For layers:
    the second of three pipeline stages, with three partitions of the layers.
    """
    heads = {"two heads per replica": _place(tp_size=4, tp_rank=1, attn_tp_size=2, attn_tp_rank=1)}
    heads["four ranks"] = _place(tp_size=4, tp_rank=1, attn_tp_size=4, attn_tp_rank=1)
    layers = {}
    for partition in ("8,12,12", "10,12,10", ""):
        with patch.dict("os.environ", {identity.STAGE_LAYERS: partition}):
            layers[partition] = _place(pp_size=3, pp_rank=1)
            layers[f"one stage, {partition}"] = _place()
    try:
        refused = _place(tp_size=2, attn_tp_size=2, attn_dcp_size=2)
    except GeometryError as error:
        refused = str(error)
    return {"heads": heads, "layers": layers, "refused": refused}


def _place(**changed: int) -> str:
    names = ("tp_size", "pp_size", "dp_size", "nnodes", "attn_tp_size", "attn_cp_size", "attn_dcp_size")
    sizes = dict.fromkeys(names, 1)
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "dp_rank", "attn_tp_rank"), 0)
    with patch.object(identity, "get_parallel", lambda: SimpleNamespace(**{**sizes, **ranks, **changed})):
        return identity.Place.of_this_process().name


def _no_adapters() -> Any:
    return SimpleNamespace(lora_paths=None)


def _keys(place: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = write_model(place / "text", LLAMA)
    arguments = ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True)
    model = ModelConfig.from_server_args(arguments)
    yield "arguments", wrong_fields(ARGUMENTS, arguments, model)
    other = FieldTable("ServerArgs", "", (*ARGUMENTS.taken[1:], "port"), read=ARGUMENTS.read)
    with patch.object(identity, "ARGUMENTS", other):
        yield "control: other arguments", wrong_fields(ARGUMENTS, arguments, model)

    usual, found = namespace(arguments, model), {}
    quantised = copy.copy(model)
    quantised.quantization = "modelopt"
    found["quantised"] = namespace(arguments, quantised)
    (folder / "hf_quant_config.json").write_text('{"exclude_modules": ["a"]}')
    found["quantised by a file"] = namespace(arguments, quantised)
    found["remote code"] = namespace(_with(arguments, trust_remote_code=True), model)
    (folder / "model.py").write_text("x = 1")
    found["remote code of a file"] = namespace(_with(arguments, trust_remote_code=True), model)
    for scale in ("1", "2"):
        (place / "scales.json").write_text(scale)
        found[f"scales {scale}"] = namespace(
            _with(arguments, quantization_param_path=str(place / "scales.json")), model
        )
    with patch.object(identity, "sglang_version", "0.0.1"):
        found["another version"] = namespace(arguments, model)
    same = ["remote code"]
    yield (
        "keys",
        {
            "apart": len({usual, *(key for name, key in found.items() if name not in same)}),
            "as usual": [name for name in same if found[name] == usual],
        },
    )
    yield "attention", attention(arguments, model)
    yield "environment", _environment(arguments, model)
    yield "other process", _other_process(arguments, model)
    yield "vision", _vision(place)
    yield "weights", _weights(place, arguments, model)
    yield "loader", _loader(arguments, model)


def _weights(place: Path, arguments: Any, model: Any) -> dict[str, Any]:
    """Finds the path arguments for which the key depends on the content at the path, and not on the path itself."""
    named, settings = load_config({"identity.model": "mine"}, {}), load_config({}, {})
    apart, same, read = [], [], []
    for name in OTHER_WEIGHTS:
        keys = {}
        for folder, content in (("one", b"one"), ("copy", b"one"), ("one", b"two")):
            path = place / name / folder
            path.mkdir(parents=True, exist_ok=True)
            (path / "pytorch_model.bin").write_bytes(content * 5000)
            given = _with(arguments, **{name: str(path)})
            keys[folder, content] = namespace(given, model)
            if str(path) in identity._content_of(given, model, named).paths:
                read.append(name)
        apart += [name] * (keys["one", b"one"] != keys["one", b"two"])
        same += [name] * (keys["one", b"one"] == keys["copy", b"one"])
    file = place / "algorithm.yaml"
    algorithms = []
    for text in ("threshold: 1", "threshold: 2"):
        file.write_text(text)
        algorithms.append(namespace(_with(arguments, dllm_algorithm_config=str(file)), model))
    return {
        "apart": apart,
        "copies are the same": same,
        "read whole": sorted(set(read)),
        "algorithm apart": len({*algorithms, namespace(arguments, model)}),
        "control: paths without": list(identity._content_of(arguments, model, named).paths),
        "control: the model's": len(identity._content_of(arguments, model, settings).paths),
    }


def _loader(arguments: Any, model: Any) -> dict[str, Any]:
    """Finds which loader formats leave the key unchanged. Also finds whether loader options that change only the speed
    leave it unchanged."""
    usual = namespace(arguments, model)

    def is_usual(**given: Any) -> bool:
        return namespace(_with(arguments, **given), model) == usual

    formats = ("auto", "safetensors", "fastsafetensors", "runai_streamer", "pt", "npcache", "mistral")
    return {
        "formats": [name for name in formats if is_usual(load_format=name)],
        "speed": is_usual(model_loader_extra_config='{"num_threads": 4, "enable_multithread_load": true}'),
        "control: a path": is_usual(model_loader_extra_config='{"presharded_path": "/x"}'),
    }


def _environment(arguments: Any, model: Any) -> dict[str, Any]:
    """Returns the environment variables that should change the key but do not. Also returns whether setting them to
    their defaults changes it."""
    usual, in_vain, apart_by_default = namespace(arguments, model), [], []
    for name in (*ENVIRONMENT, "SGLANG_LOG_MS"):
        field = getattr(envs, name)
        other = {bool: not field.default, str: f"{field.default}fp8"}.get(type(field.default), 0.5)
        other = '{"a": 1}' if isinstance(field, EnvJSON) else other
        with patch.dict("os.environ", {name: str(other)}):
            in_vain += [name] * (namespace(arguments, model) == usual)
        with patch.dict("os.environ", {} if field.default is None else {name: str(field.default)}):
            apart_by_default += [name] * (namespace(arguments, model) != usual)
    return {"in vain": in_vain, "apart by default": apart_by_default}


def _other_process(arguments: Any, model: Any) -> dict[str, Any]:
    """Returns the arguments with which two starts of an engine have different keys."""
    given = [{"load_format": name} for name in ("remote_instance", "presharded", "ipc_cache", "pt")]
    given += [{"weight_cache_mode": mode} for mode in ("off", "client", "daemon")]
    apart, named = [], []
    for one in given:
        with_it = _with(arguments, **one)
        apart += list(one.values()) * (namespace(with_it, model) != namespace(with_it, model))
        named += list(one.values()) * (namespace(with_it, model, "mine") != namespace(with_it, model, "mine"))
    return {"apart": apart, "apart, with identity.model": named}


def _with(arguments: Any, **values: Any) -> Any:
    changed = copy.copy(arguments)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _vision(place: Path) -> dict[str, Any]:
    """Compares the keys of a model that takes images, with two configurations of its vision part. Also compares them
    with the keys of the same model without images.
    """
    keys, kinds = [], []
    for layer in (-2, -1):
        folder = write_model(place / f"vision{layer}", LLAVA | {"vision_feature_layer": layer})
        for only_text in (False, True):
            arguments = ServerArgs(
                model_path=str(folder), device="cpu", skip_tokenizer_init=True, language_model_only=only_text
            )
            model = ModelConfig.from_server_args(arguments)
            kinds.append(bool(model.is_multimodal))
            keys.append(namespace(arguments, model))
    return {"takes images": kinds, "images apart": keys[0] != keys[2], "text is the same": keys[1] == keys[3]}
