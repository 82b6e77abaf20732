"""Different weights, different identity; the same weights, the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.adapters.common.weights import SAMPLE_BYTES, SAMPLES_PER_FILE, weights_identity
from flexkv.errors import ConfigError

SIZE = SAMPLES_PER_FILE * SAMPLE_BYTES * 4


def write(folder: Path, name: str = "model.safetensors", change: int | None = None) -> str:
    folder.mkdir()
    content = bytearray(i * 7 % 251 for i in range(SIZE))
    if change is not None:
        for at in range(change, SIZE, SAMPLE_BYTES):
            content[at] ^= 1
    (folder / name).write_bytes(content)
    return str(folder)


def test_the_same_content_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    assert weights_identity(write(tmp_path / "a"), None) == weights_identity(write(tmp_path / "b"), None)


def test_a_fine_tune_of_the_same_shape_is_another_model(tmp_path: Path) -> None:
    assert weights_identity(write(tmp_path / "a"), None) != weights_identity(
        write(tmp_path / "b", change=5), None
    )


def test_a_hub_snapshot_is_named_by_its_commit() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert weights_identity(f"/cache/models--x/snapshots/{commit}", None) == f"commit:{commit}"


@pytest.mark.parametrize(("one", "other"), [("math", "code"), ("x-Q4_K_M.gguf", "x-Q8_0.gguf"), ("", "sub")])
def test_what_lies_in_one_commit_side_by_side_is_apart(one: str, other: str) -> None:
    commit = "/cache/models--x/snapshots/" + "c" * 40
    assert weights_identity(f"{commit}/{one}", None) != weights_identity(f"{commit}/{other}", None)
    assert weights_identity(f"{commit}/{one}/", None) == weights_identity(f"{commit}/./{one}", None)


def test_a_hub_name_is_taken_with_its_commit() -> None:
    one, other = "a" * 40, "b" * 40
    assert weights_identity("org/model", one) != weights_identity("org/model", other)
    assert weights_identity("org/model", "main", one) == weights_identity("org/model", one)


@pytest.mark.parametrize("revision", [None, "main", "v2", "a" * 39])
def test_a_revision_that_may_move_identifies_nothing(revision: str | None) -> None:
    with pytest.raises(ConfigError, match=r"identity\.model"):
        weights_identity("org/model", revision)


def test_a_folder_without_weights_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"identity\.model"):
        weights_identity(str(tmp_path), None)
