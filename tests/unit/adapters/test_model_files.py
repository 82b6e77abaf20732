"""What files beside the weights say: read from a folder, from the hub's cache, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_a_hub_name_is_read_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / PROCESSOR).write_text('{"size": 3}')
    asked = []

    def cached(repository: str, name: str, revision: str) -> object:
        asked.append((repository, revision))
        # The cache says of a file that it knows nothing, or that the repository has none.
        return {PROCESSOR: str(tmp_path / PROCESSOR), "processor_config.json": object()}.get(name)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert processor_files("owner/name:Q4_K_M", "a" * 40) == {PROCESSOR: {"size": 3}}
    assert set(asked) == {("owner/name", "a" * 40)}


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
