"""Blending with a model of each supported family, and on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.model import PRESETS, WEIGHT_STD, model_config, model_weights, write_tokenizer
from flexkv.adapters.vllm.blend import ARCHITECTURES
from flexkv.storage.folder import LOCK_NAME, FolderLock

from .blend_world import Documents, blending, results, salt, start_blending
from .conftest import Engines
from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_blend import COMPUTED, STORED
from .test_parallel import TWO_RANKS

pytestmark = pytest.mark.long

ROUNDING = 1e-4

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MistralForCausalLM": ("mistral", {"sliding_window": None}),
    "Qwen2ForCausalLM": ("qwen2", {"use_sliding_window": False}),
    "Qwen3ForCausalLM": ("qwen3", {"use_sliding_window": False}),
}


def write_family(folder: Path, architecture: str) -> Path:
    """Writes a model with random weights of the given family. It has the biases and norms that the family's attention
    has."""
    from safetensors.numpy import save_file

    shape = PRESETS["tiny"]
    kind, particular = FAMILIES[architecture]
    random = np.random.default_rng(5)

    def drawn(rows: int, columns: int, std: float = WEIGHT_STD) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * std).astype(np.float32)

    def attention(prefix: str) -> dict[str, np.ndarray]:
        sizes = {"q": shape.heads * shape.head_size, "k": shape.kv_heads * shape.head_size}
        sizes["v"] = sizes["k"]
        found = {f"{prefix}{name}_proj.weight": drawn(rows, shape.hidden) for name, rows in sizes.items()}
        found[prefix + "o_proj.weight"] = drawn(shape.hidden, sizes["q"])
        if kind == "qwen2":
            found |= {f"{prefix}{name}_proj.bias": drawn(1, rows)[0] for name, rows in sizes.items()}
        if kind == "qwen3":
            for name in ("q", "k"):
                found[f"{prefix}{name}_norm.weight"] = 1 + drawn(1, shape.head_size)[0]
        return found

    folder.mkdir()
    config = model_config(architecture, kind, shape, head_dim=shape.head_size, **particular)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(model_weights(shape, drawn, attention), str(folder / "model.safetensors"), {"format": "pt"})
    write_tokenizer(folder, shape)
    return folder


def check_blends(session: EngineSession, stream: int) -> None:
    """Checks that a ratio of 1 gives the full computation, and that a lower ratio reuses rows."""
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    before = results(session)
    [full] = session.ask(documents.plain())
    [same] = session.ask(documents.blended(1.0))
    [some] = session.ask(documents.blended(0.15))
    assert (same.tokens, same.log_probabilities) == (full.tokens, full.log_probabilities)
    assert some.log_probabilities != full.log_probabilities
    assert results(session)["blended"] - before.get("blended", 0) == 2


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_family_blends(engines: Engines, tmp_path: Path, stream: int, architecture: str) -> None:
    model = write_family(tmp_path / "model", architecture)
    session = start_blending(engines, model=str(model), architecture=ARCHITECTURES[architecture])
    check_blends(session, stream)
    documents = Documents.of(stream % 10_000_000 + 50)
    found = session.call(
        "blend_oracle",
        full=documents.plain().wire(),
        blended=_stored(session, documents).wire(),
        share=0.2,
    )
    assert found["runs"] > 30
    assert found["worst"] < 1e-3


def _stored(session: EngineSession, documents: Documents) -> Prompt:
    documents.store(session)
    return documents.blended(0.15)


@pytest.mark.parametrize(
    "changed", [{"enforce_eager": False}, {"dtype": "bfloat16"}], ids=["compiled", "bfloat16"]
)
def test_other_arithmetic_blends(engines: Engines, stream: int, changed: dict[str, Any]) -> None:
    """A compiled model can be blended, too: the layers of a blended step run one by one. The results are equal to those
    of the full computation up to rounding."""
    session = start_blending(engines, **changed)
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    [full] = session.ask(documents.plain(max_tokens=1))
    [same] = session.ask(documents.blended(1.0, max_tokens=1))
    [some] = session.ask(documents.blended(0.15, max_tokens=1))
    assert same.tokens == full.tokens
    assert abs(same.log_probabilities[0] - full.log_probabilities[0]) < 1e-4
    assert some.log_probabilities != full.log_probabilities
    assert results(session) == {"stored": 3, "blended": 2}


def test_two_ranks_blend_the_same_rows(engines: Engines, stream: int) -> None:
    session = start_blending(engines, environment=TWO_RANKS, tensor_parallel_size=2)
    check_blends(session, stream)
    rows = session.process.metrics("vllm:flexkv_blend_rows_total")
    assert rows
    assert not any(value for key, value in rows.items() if "unplaced" in key)
    documents = Documents.of(stream % 10_000_000)
    kept = [
        session.call("blend_kept", request=documents.blended(0.15).wire(), alone=alone)["ranks"]
        for alone in (False, True)
    ]
    assert kept[0][0] == kept[0][1]
    assert kept[1][0] != kept[1][1], "the control: each rank has chosen by its own heads"
    assert kept[0][0] not in kept[1], "the heads of both decide"
    captured = []
    for number, wrong in enumerate(("", "row before")):
        segment = Prompt.of(75, stream % 10_000_000 + 70 + number, max_tokens=1)
        full = replace(segment, salt=f"full-{number}")
        store = replace(segment, salt=salt(), extra=blending({"store": True}))
        asks = {"full": full.wire(), "store": store.wire()}
        captured.append(session.call("blend_captured", chunk=33, wrong=wrong, **asks))
    assert max(captured[0].values()) < ROUNDING
    assert min(captured[1].values()) > 0.1


def check_ranks(found: dict[str, Any]) -> None:
    """Checks that the two ranks kept the same rows, each rank for its own heads."""
    first, second = found["ranks"]
    assert first["kept"] == second["kept"]
    assert first["heads"] == second["heads"] == PRESETS["tiny"].kv_heads // 2
    assert first["sum"] != second["sum"]


def test_each_rank_has_the_keys_of_the_full_computation_in_every_kept_row(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    """On each of two ranks, every kept row has the keys of the full computation, for the rank's own heads. The test
    compares rows in memory, and rows that the rank's next process reads from disk. The control breaks the mask, and the
    keys differ on both ranks.
    """
    disk = {
        "disk.folders": str(tmp_path),
        "disk.bytes_per_folder": 64 << 20,
        "blend.disk_bytes": 32 << 20,
    }
    documents = Documents.of(stream % 10_000_000)
    spans = [list(span) for span in documents.spans]

    def start() -> EngineSession:
        return start_blending(engines, disk, environment=TWO_RANKS, tensor_parallel_size=2)

    def oracle(**how: bool) -> dict[str, Any]:
        asks = {"full": documents.plain().wire(), "blended": documents.blended(0.15).wire()}
        found = session.call("blend_oracle", share=0.2, **asks, **how)
        check_ranks(found)
        return found

    session = start()
    session.call("blend_store_true", full=documents.plain().wire(), spans=spans)
    for loaded in (False, True):
        found = oracle(loaded=loaded)
        assert found["runs"] > 30
        assert max(rank["worst"] for rank in found["ranks"]) < ROUNDING
        control = oracle(loaded=loaded, one_sequence=True)
        assert min(rank["worst"] for rank in control["ranks"]) > 0.1
        if not loaded:
            session.settle()
            session.process.kill()
            session = start()
    pages = sum(-(-(end - first) // 16) for first, end in documents.spans)
    assert session.metric("vllm:flexkv_blend_disk_pages_total{direction=read}") == 2 * pages


def test_a_rank_whose_folder_is_in_use_turns_blending_off_on_both(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    """If one rank cannot blend because its folder is in use, both ranks turn blending off. The ranks run blending's
    self-test together when they start, so a rank that did not learn of the other's failure would wait for it.
    """
    disk = {
        "disk.folders": str(tmp_path),
        "disk.bytes_per_folder": 64 << 20,
        "blend.disk_bytes": 32 << 20,
    }

    def start() -> EngineSession:
        return start_blending(engines, disk, environment=TWO_RANKS, tensor_parallel_size=2)

    start().process.kill()
    [lock] = [path for path in tmp_path.rglob(LOCK_NAME) if "segments-dp0-rank1" in str(path)]
    held = FolderLock(lock.parent)
    try:
        session = start()
        documents = Documents.of(stream % 10_000_000)
        documents.store(session)
        session.check_one(documents.blended(0.0))
        assert results(session) == {"off": 4}
    finally:
        held.release()


def test_without_its_model_class_the_engine_computes_fully(engines: Engines, stream: int) -> None:
    session = start_blending(engines, architecture="LlamaForCausalLM")
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    session.check_one(documents.blended(0.0))
    assert results(session) == {"off": 4}
    said = session.process.log.read_text()
    assert (
        said.count("blending is off, and requests that ask for it are computed fully: start vLLM with") == 1
    )


def test_lazy_stores_take_nothing_of_a_blended_request(engines: Engines, stream: int) -> None:
    """Lazy stores store no block of a blended request. They are planned when other requests are about to take a
    request's blocks. The control is an ordinary request, whose pages are stored.
    """
    session = start_blending(engines, {"store.mode": "lazy"})
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    others = iter(range(100))

    def stored_of(prompt: Prompt) -> float:
        """Returns how many pages are stored while other requests take the blocks of a prompt. The blocks of those other
        requests are not stored.
        """
        session.forget()
        before = session.metric(STORED)
        session.ask(prompt)
        for _ in range(3):
            private = {"kv_transfer_params": {"skip_save": True}}
            session.ask(Prompt.of(1500, stream + next(others), max_tokens=1, extra=private))
        session.settle()
        return session.metric(STORED) - before

    assert stored_of(documents.blended(0.0)) == 0
    plain = documents.plain(salt="")
    assert stored_of(plain) >= plain.whole_blocks // BLOCK_TOKENS
    session.forget()
    assert session.check_one(documents.plain(salt="")).cached > 0


def test_preemption_without_a_prefix_cache(engines: Engines, stream: int) -> None:
    session = start_blending(
        engines, enable_prefix_caching=False, num_gpu_blocks_override=58, max_model_len=1024
    )
    several = [
        Documents.of(stream % 10_000_000 + 100 * number, (300, 256, 200), max_tokens=120)
        for number in range(2)
    ]
    for each in several:
        each.store(session)
    before, rows = session.metric("vllm:num_preemptions_total"), session.metric(COMPUTED)
    session.check(*(each.blended(1.0) for each in several))
    preempted = session.metric("vllm:num_preemptions_total") - before
    assert preempted > 0
    covered = sum(end - first for first, end in several[0].spans)
    assert session.metric(COMPUTED) - rows == (2 + preempted) * covered, "each of them is blended again"


def test_a_text_separates(engines: Engines, stream: int) -> None:
    """Separators of segments may be given as text. This engine also uses the names that another system has for some
    settings."""
    names = {"blend.enabled": "enable_blending", "blend.separators": "blend_special_str"}
    # "w5" is the text of the token with id 5
    session = start_blending(engines, {"blend.separators": "w5"}, names=names)
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    [named] = session.ask(documents.blended(0.15))
    [found] = session.ask(documents.blended(extra=blending(True)))
    assert found.log_probabilities == named.log_probabilities
