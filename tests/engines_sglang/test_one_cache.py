"""SGLang and vLLM use one folder. Each gets hits on pages that the other one stored. They are converted to its own
encoding.
"""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess
from demo.sglang_process import ROOT, SglangProcess
from flexkv import c_ext
from flexkv.config.names import environment_name
from flexkv.storage.header import DIGEST_AT, read_header
from tests.engines_sglang.conftest import OUTPUT_TOKENS, PROMPTS, Judge, judge_of, request
from tests.engines_sglang.spied import wait_until_durable

BLOCK_TOKENS = 32
"""Number of tokens per block: the smallest that vLLM allows on a CPU. SGLang uses it as its page size."""

WRITTEN_DEADLINE_S = 60.0
NAMED_DEADLINE_S = 60.0

NAMES = ("a", "b")
NOTHING = [7, 8, 9]
"""A prompt that is too short to be cached."""

CACHED = {name: (len(PROMPTS[name]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for name in NAMES}
SETTINGS = {
    "host.bytes": 48 << 20,
    "keys.scheme": "common",
    "disk.bytes_per_folder": 64 << 20,
    # The test checks which pages the disk serves, not how fast, because the machine may be busy.
    "disk.compute_if_faster": False,
    "load.lookup_wait_s": 30.0,
}


class Sglang:
    """An SGLang engine that uses the folder. Its arguments contain neither a linker nor settings of flexkv: flexkv's
    entry point adds the linker, and the settings come from a file and environment variables.
    """

    def __init__(self, model: Path, log: Path, disk: Path, **more: str) -> None:
        settings = log.with_suffix(".yaml")
        settings.write_text(json.dumps(SETTINGS))
        environment = {"FLEXKV_CONFIG": str(settings), "FLEXKV_DISK_FOLDERS": str(disk)}
        environment |= {environment_name(setting): value for setting, value in more.items()}
        arguments = {
            "enable_unified_cache_external_linker": True,
            "unified_cache_external_linker_backend": "dynamic",
            "page_size": BLOCK_TOKENS,
        }
        self.log = log
        self.process = SglangProcess(model, log, arguments, **environment)

    def ask(self, name: str) -> dict[str, Any]:
        [answer] = self.process.call("generate", requests=[request(name)])
        return dict(answer)

    def step(self) -> None:
        self.process.call("generate", requests=[{"ids": NOTHING, "tokens": 1}])


class Vllm:
    """A vLLM engine that uses the folder. If `disk` is None, the engine has no flexkv and no prefix cache."""

    def __init__(self, model: Path, log: Path, disk: Path | None, **more: str) -> None:
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": 65,
            "seed": 0,
        }
        if disk is None:
            arguments["enable_prefix_caching"] = False
        else:
            extra = {**SETTINGS, **more, "disk.folders": str(disk)}
            arguments["kv_transfer_config"] = {**FLEXKV, "kv_connector_extra_config": extra}
        environment = {**IN_PROCESS, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.log = log
        self.process = EngineProcess(arguments, log, (), environment, [ROOT])

    def ask(self, name: str) -> dict[str, Any]:
        wanted = {"ids": PROMPTS[name], "max_tokens": OUTPUT_TOKENS, "logprobs": True}
        [answer] = self.process.generate([wanted])
        return answer | {"cached": answer["cached"] or 0}

    def step(self) -> None:
        self.process.generate([{"ids": NOTHING, "max_tokens": 1}])


@contextmanager
def over(disk: Path | None, engine: Sglang | Vllm, stores: bool = False) -> Iterator[Sglang | Vllm]:
    """Runs the `with` block with the engine, waits until the engine's stores are on disk, and ends the engine.

    Args:
        disk: the folder; None if the engine has no flexkv.
        stores: whether the engine stores pages within the block. If so, this function first waits for the first write.
    """
    try:
        if disk is not None:
            wait_for_weights(engine)
        before = slab_times(disk) if stores else {}
        yield engine
        ends_s = time.monotonic() + WRITTEN_DEADLINE_S
        while stores and slab_times(disk) == before:
            # If the folder has not changed, the engine may not have begun its stores yet.
            assert time.monotonic() < ends_s, "nothing was written to disk"
            time.sleep(0.1)
        if disk is not None:
            wait_until_durable(disk)
    finally:
        engine.process.close()


def wait_for_weights(engine: Sglang | Vllm) -> None:
    """Waits until flexkv has the digest of the engine's weights. Until then flexkv serves no pages from disk. An
    engine's start waits only a few seconds for the digest.
    """
    ends_s = time.monotonic() + NAMED_DEADLINE_S
    engine.step()
    while "the engine's weights are named" not in engine.log.read_text():
        assert time.monotonic() < ends_s, "nothing names the engine's weights"
        time.sleep(0.05)
        engine.step()


def slab_times(disk: Path | None) -> dict[str, int]:
    """Returns the time of the last write to each slab."""
    slabs = [] if disk is None else disk.rglob("*.slab")
    return {str(slab): slab.stat().st_mtime_ns for slab in slabs}


def test_each_engine_is_served_what_the_other_stored(model: Path, judge: Judge, tmp_path: Path) -> None:
    disk, spoiled = tmp_path / "disk", tmp_path / "spoiled"
    with over(None, Vllm(model, tmp_path / "vllm-plain.log", None)) as plain:
        judge_vllm = judge_of({name: plain.ask(name) for name in NAMES})

    with over(disk, Sglang(model, tmp_path / "sglang-stores.log", disk), stores=True) as sglang:
        cold = sglang.ask("a")
        judge("a", cold)
        assert cold["cached"] == 0
    shutil.copytree(disk, spoiled)

    with over(disk, Vllm(model, tmp_path / "vllm-loads.log", disk), stores=True) as vllm:
        for name, cached in (("a", CACHED["a"]), ("b", 0)):
            answer = vllm.ask(name)
            judge_vllm(name, answer)
            assert answer["cached"] == cached

    with over(disk, Sglang(model, tmp_path / "sglang-loads.log", disk)) as sglang:
        answer = sglang.ask("b")
        judge("b", answer)
        assert answer["cached"] == CACHED["b"]

    # A control: if pages are converted from a wrong encoding, the answer differs.
    say_another_order(spoiled)
    with over(spoiled, Vllm(model, tmp_path / "vllm-spoiled.log", spoiled)) as vllm:
        answer = vllm.ask("a")
        assert answer["cached"] == CACHED["a"]
        with pytest.raises(
            AssertionError, match=r"(tokens|log probabilities) of the answer to 'a' are others"
        ):
            judge_vllm("a", answer)


def say_another_order(disk: Path) -> None:
    """Changes the encoding in the slab's header from SGLang's order (tokens before heads) to heads before tokens."""
    [slab] = disk.rglob("*.slab")
    header = read_header(str(slab))
    raw = bytearray(slab.read_bytes()[: header.header_bytes])
    own, other = b"kv-nhd32.", b"kv-hnd32."
    assert raw.count(own) == 1, header.format_id
    raw[:] = raw.replace(own, other)
    struct.pack_into("<Q", raw, DIGEST_AT, 0)
    struct.pack_into("<Q", raw, DIGEST_AT, c_ext.run_digest(bytes(raw)))
    with slab.open("r+b") as file:
        file.write(raw)
