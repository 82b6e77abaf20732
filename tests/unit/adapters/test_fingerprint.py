"""Whatever changes the KV changes the namespace; whatever does not, does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexkv.adapters.vllm.fingerprint import engine_namespace
from flexkv.adapters.vllm.geometry import BlockGeometry
from flexkv.config import load_config
from flexkv.errors import KeySchemeError

GEOMETRY = BlockGeometry(16, 16, 100, ("l.0", "l.1"))


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
        "text": TextConfig(),
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=values["model"],
            revision=values["revision"],
            seed=values["seed"],
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_text_config=values["text"],
        ),
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"],
            prefix_caching_hash_algo=values["hash"],
            calculate_kv_scales=False,
        ),
        load_config=SimpleNamespace(load_format=values["load_format"]),
        speculative_config=SimpleNamespace(model=values["draft"]) if values["draft"] else None,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return tmp_path


def namespace(folder: Path, geometry: BlockGeometry = GEOMETRY, extra: Any = None, **changes: Any) -> bytes:
    return engine_namespace(config(folder, **changes), geometry, load_config(extra or {}, {}))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e4m3"},
        {"hash": "sha256_cbor"},
        {"draft": "eagle"},
        {"text": TextConfig(rope_parameters={"rope_theta": 5e5})},
        {"extra": {"identity.namespace": "b"}},
        {"extra": {"identity.model": "v2"}},
        {"geometry": BlockGeometry(32, 32, 100, ("l.0", "l.1"))},
        {"geometry": BlockGeometry(16, 16, 100, ("l.0",))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_the_kv_changes_the_namespace(folder: Path, changes: dict) -> None:
    assert namespace(folder, **changes) != namespace(folder)


def test_where_the_model_was_read_from_does_not_count(folder: Path) -> None:
    assert namespace(folder, text=TextConfig(_name_or_path="y")) == namespace(folder)
    assert namespace(folder, geometry=BlockGeometry(16, 16, 7, ("l.0", "l.1"))) == namespace(folder)


def test_random_weights_are_told_apart_by_their_seed(folder: Path) -> None:
    assert namespace(folder, load_format="dummy") != namespace(folder, load_format="dummy", seed=1)
    assert namespace(folder) == namespace(folder, seed=1)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin"])
def test_a_hash_that_can_be_forged_is_refused(folder: Path, algorithm: str) -> None:
    with pytest.raises(KeySchemeError, match=r"--prefix-caching-hash-algo .*sha256"):
        namespace(folder, hash=algorithm)
