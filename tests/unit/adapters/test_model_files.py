"""flexkv reads facts from files beside the weights, but only if the model is given as a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from flexkv.adapters.common import model_files
from flexkv.adapters.common.model_files import code_files, file_digest, processor_files, quantization_files
from flexkv.errors import ConfigError

PROCESSOR = "preprocessor_config.json"


def test_a_folder_and_a_file_in_it_have_the_same_files(tmp_path: Path) -> None:
    (tmp_path / PROCESSOR).write_text(
        json.dumps({"size": 3, "chat_template": "a", "transformers_version": "5"})
    )
    (tmp_path / "x.gguf").write_bytes(b"weights")
    assert processor_files(str(tmp_path)) == {PROCESSOR: {"size": 3}}
    assert processor_files(str(tmp_path / "x.gguf")) == {PROCESSOR: {"size": 3}}
    assert quantization_files(str(tmp_path)) == {}


def test_mistrals_tokenizer_counts_by_its_images_alone(tmp_path: Path) -> None:
    file = tmp_path / "tekken.json"
    file.write_text(json.dumps({"vocab": [1], "image": {"image_patch_size": 16}}))
    before = processor_files(str(tmp_path))
    file.write_text(json.dumps({"vocab": [2], "image": {"image_patch_size": 16}}))
    assert processor_files(str(tmp_path)) == before
    file.write_text(json.dumps({"vocab": [1], "image": {"image_patch_size": 14}}))
    assert processor_files(str(tmp_path)) != before


@pytest.mark.parametrize("content", [b"\xff\xfe not json", b"[1, 2]", b'"text"', b""])
def test_a_file_of_another_form_counts_by_its_content(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PROCESSOR).write_bytes(content)
    one = processor_files(str(tmp_path))
    (tmp_path / PROCESSOR).write_bytes(b"[3]")
    assert processor_files(str(tmp_path)) != one


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine's cache of the Hugging Face hub appear to contain the model's files, including Python code."""
    for name in (PROCESSOR, "tekken.json", "hf_quant_config.json"):
        (folder / name).write_text('{"size": 3}')

    def find(repository: str, name: str, **_: object) -> str:
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", find)


def read(model: str, *place: Any) -> list[dict[str, Any]]:
    return [read(model, *place) for read in (processor_files, quantization_files, code_files)]


@pytest.mark.parametrize("place", [("a" * 40,), ("a" * 40, True), ("main", True), (None, True), ("main",)])
def test_what_this_machines_cache_holds_of_a_hub_name_is_in_no_key(
    place: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read("owner/name:Q4_K_M", *place)
    cached(tmp_path, monkeypatch)
    assert read("owner/name:Q4_K_M", *place) == before
    assert read(str(tmp_path), *place) != before, "the control"


def test_a_commit_stands_for_the_files_where_the_user_names_the_weights() -> None:
    assert read("owner/name", "a" * 40, True) == [{"commit": "a" * 40}] * 3
    assert read("owner/name", "a" * 40) == read("owner/name", "main", True) == [{}] * 3


def test_a_folder_is_what_it_holds_whatever_the_commit(tmp_path: Path) -> None:
    (tmp_path / PROCESSOR).write_text('{"size": 3}')
    assert processor_files(str(tmp_path), "a" * 40, True) == {PROCESSOR: {"size": 3}}


@pytest.mark.parametrize("model", ["/no/such/folder", "s3://bucket/model", "a/b/c", "../models/x"])
def test_what_is_no_hub_name_and_not_here_has_no_files(model: str) -> None:
    assert processor_files(model) == quantization_files(model) == code_files(model) == {}


def test_a_file_that_is_too_large_or_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PROCESSOR).write_text('{"size": 3}')
    assert len(file_digest(str(tmp_path / PROCESSOR))) == 64
    monkeypatch.setattr(model_files, "MOST_BYTES", 3)
    with pytest.raises(ConfigError, match=rf"{PROCESSOR} has 11 bytes; .* 3 at most"):
        processor_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"gone\.json"):
        file_digest(str(tmp_path / "gone.json"))


def test_code_counts_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    one = code_files(str(tmp_path))
    assert list(one) == ["model.py"]
    (tmp_path / "model.py").write_text("x = 2")
    assert code_files(str(tmp_path)) != one
