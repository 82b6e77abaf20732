"""Different weights have different identities, and equal weights have the same identity."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexkv.adapters.common.weights import weights_content, weights_identity
from flexkv.errors import ConfigError
from flexkv.weights.files import NAMED, WeightsContent
from flexkv.weights.fingerprint import (
    EVEN_SAMPLES,
    LEAST_READS,
    LEAST_SMALL_BYTES,
    SAMPLE_BYTES,
    SMALL_BYTES,
    Budget,
    SampledRun,
    tensor_runs,
)
from tests.unit.weights.tensor_files import HIDDEN, change, write_model

SIZE = EVEN_SAMPLES * SAMPLE_BYTES * 4
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write(folder: Path, name: str = "model.bin", changed: int | None = None) -> str:
    """Writes a file of weights in a format in which flexkv does not know the positions of tensors."""
    folder.mkdir(exist_ok=True)
    content = bytearray(i * 7 % 251 for i in range(SIZE))
    if changed is not None:
        for at in range(changed, SIZE, SAMPLE_BYTES):
            content[at] ^= 1
    (folder / name).write_bytes(content)
    return str(folder)


def identity(folder: Path) -> str:
    return weights_identity(str(folder), None)


def test_the_same_content_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    assert weights_identity(write(tmp_path / "a"), None) == weights_identity(write(tmp_path / "b"), None)
    assert identity(write_model(tmp_path / "c")) == identity(write_model(tmp_path / "d"))


def test_a_fine_tune_of_the_same_shape_is_another_model(tmp_path: Path) -> None:
    assert weights_identity(write(tmp_path / "a"), None) != weights_identity(
        write(tmp_path / "b", changed=5), None
    )


@pytest.mark.parametrize("place", [0, HIDDEN // 2, HIDDEN - 1])
@pytest.mark.parametrize("norm", ["model.layers.0.input_layernorm.weight", "model.norm.weight"])
def test_one_changed_value_of_a_norm_is_another_model(tmp_path: Path, norm: str, place: int) -> None:
    before = identity(write_model(tmp_path / "a"))
    change(tmp_path / "a" / "model.safetensors", norm, place)
    assert identity(tmp_path / "a") != before


def test_every_tensor_has_a_sample(tmp_path: Path) -> None:
    tensors = [
        (f"layer {number}", SampledRun(number * 100_000, (number + 1) * 100_000)) for number in range(500)
    ]
    runs = tensor_runs(tensors, Budget.of_files(1))
    assert len(runs) == len(tensors)
    for (name, tensor), run in zip(tensors, runs, strict=True):
        assert tensor.start <= run.start < run.end <= tensor.end, name


def test_control_a_single_value_of_a_large_tensor_is_not_seen(tmp_path: Path) -> None:
    """The control: sampling does not notice a changed value in a large tensor. Only the digest of all content does."""
    before = identity(write_model(tmp_path / "a"))
    change(tmp_path / "a" / "model.safetensors", "model.embed_tokens.weight", 1000 * HIDDEN, 8 * HIDDEN)
    assert identity(tmp_path / "a") == before


def test_the_reads_of_many_files_are_bounded() -> None:
    """The number of samples stays within its bound for a hundred files with 2,000 tensors each."""
    budget = Budget.of_files(100)
    small = [(f"small {n}", SampledRun(n * 300_000, n * 300_000 + SMALL_BYTES)) for n in range(1000)]
    large = [(f"large {n}", SampledRun(n * 300_000 + 100_000, n * 300_000 + 200_000)) for n in range(1000)]
    runs = tensor_runs(small + large, budget)
    assert len(runs) <= budget.reads == 163
    assert sum(map(len, runs)) <= budget.small_bytes + budget.reads * SAMPLE_BYTES
    assert any(len(run) == SMALL_BYTES for run in runs)
    assert any(len(run) == SAMPLE_BYTES for run in runs)
    assert Budget.of_files(10**6) == Budget(LEAST_READS, LEAST_SMALL_BYTES)


@pytest.mark.parametrize(
    "name", ["model.pt", "consolidated.pth", "pytorch_model.bin", "x.gguf", "adapter_model.bin"]
)
def test_a_file_beside_the_others_that_an_engine_may_load_counts(tmp_path: Path, name: str) -> None:
    before = identity(write_model(tmp_path / "a"))
    write(tmp_path / "a", name)
    beside = identity(tmp_path / "a")
    assert beside != before
    write(tmp_path / "a", name, changed=5)
    assert identity(tmp_path / "a") != beside


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin", "tokenizer.json", "notes.txt"])
def test_control_what_no_engine_loads_does_not_count(tmp_path: Path, name: str) -> None:
    before = identity(write_model(tmp_path / "a"))
    write(tmp_path / "a", name)
    assert identity(tmp_path / "a") == before


def test_which_files_an_index_names_counts(tmp_path: Path) -> None:
    before = identity(write_model(tmp_path / "a"))
    (tmp_path / "a" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert identity(tmp_path / "a") != before


def test_a_part_of_a_split_model_stands_for_all_parts(tmp_path: Path) -> None:
    for part in (1, 2):
        write(tmp_path, f"x-0000{part}-of-00002.gguf")
    first = tmp_path / "x-00001-of-00002.gguf"
    before = identity(first)
    write(tmp_path, "y-00002-of-00002.gguf")
    assert identity(first) == before
    write(tmp_path, "x-00002-of-00002.gguf", changed=5)
    assert identity(first) != before


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    kept = write_model(tmp_path / "kept")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(kept / "model.safetensors")
    assert identity(linked) == identity(kept)
    change(kept / "model.safetensors", "model.norm.weight")
    assert identity(linked) == identity(kept)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        (40).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 900000000]}}'.ljust(40),
        (40).to_bytes(8, "little") + b'{"a": {"data_offsets": "all of them"}}'.ljust(40),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is no whole safetensors file"):
        weights_identity(str(tmp_path), None)


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "more.bin").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"more\.bin cannot be read"):
        weights_identity(str(tmp_path), None)


def test_a_hub_snapshot_is_named_by_its_commit() -> None:
    assert weights_identity(f"/cache/models--x/snapshots/{COMMIT}", None) == f"commit:{COMMIT}"


def snapshot(root: Path) -> Path:
    """Writes the folder of a commit as in the cache of the Hugging Face hub."""
    blobs, folder = root / "blobs", root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    write_model(blobs).joinpath("model.safetensors").rename(blobs / "e3b0")
    (folder / "model.safetensors").symlink_to("../../blobs/e3b0")
    return folder


def test_a_commit_of_the_hubs_cache_is_not_read(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    assert weights_identity(str(folder), None) == f"commit:{COMMIT}"
    assert weights_content(str(folder), None) == NAMED


def test_a_commit_without_weights_is_named_by_it(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (folder / "model.safetensors").unlink()
    assert weights_identity(str(folder), None) == f"commit:{COMMIT}"


def test_a_file_that_took_the_place_of_a_commits_link_is_read(tmp_path: Path) -> None:
    folder = snapshot(tmp_path)
    (folder / "model.safetensors").unlink()
    write_model(folder, seed=1)
    assert weights_identity(str(folder), None).startswith("sampled:")
    assert weights_content(str(folder), None) == WeightsContent((str(folder),))


@pytest.mark.parametrize(("one", "other"), [("math", "code"), ("x-Q4_K_M.gguf", "x-Q8_0.gguf"), ("", "sub")])
def test_what_lies_in_one_commit_side_by_side_is_apart(one: str, other: str) -> None:
    commit = "/cache/models--x/snapshots/" + "c" * 40
    assert weights_identity(f"{commit}/{one}", None) != weights_identity(f"{commit}/{other}", None)
    assert weights_identity(f"{commit}/{one}/", None) == weights_identity(f"{commit}/./{one}", None)


def test_a_hub_name_is_taken_with_its_commit() -> None:
    one, other = "a" * 40, "b" * 40
    assert weights_identity("org/model", one) != weights_identity("org/model", other)
    assert weights_identity("org/model", "main", one) == weights_identity("org/model", one)
    assert weights_content("org/model", "main", one) == NAMED


@pytest.mark.parametrize("revision", ["main", "default", "a" * 39])
def test_a_branch_that_stands_in_for_a_commit_names_nothing_for_good(revision: str) -> None:
    content = weights_content("org/model", None, revision)
    assert not content.is_named
    assert f"org/model@{revision}" in content.unnamed
    assert "identity.model" in content.unnamed


@pytest.mark.parametrize("revision", [None, "main", "v2", "a" * 39])
def test_a_revision_that_may_move_identifies_nothing(revision: str | None) -> None:
    with pytest.raises(ConfigError, match=r"identity\.model"):
        weights_identity("org/model", revision)


def test_a_folder_without_weights_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"identity\.model"):
        weights_identity(str(tmp_path), None)


def test_a_file_that_is_cut_while_it_is_sampled_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write(tmp_path / "a"))
    assert identity(folder).startswith("sampled:"), "the control"
    monkeypatch.setattr(
        "flexkv.weights.fingerprint.os.posix_fadvise",
        lambda *_: os.truncate(folder / "model.bin", SIZE // 2 + 1),
    )
    with pytest.raises(
        ConfigError, match=rf"model\.bin has \d+ of {SAMPLE_BYTES} bytes .*it is being changed"
    ):
        identity(folder)
