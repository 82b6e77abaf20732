"""One folder, two engines: pages that SGLang stored serve vLLM, and the other way round, in either's own encoding."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess
from demo.sglang_process import SglangProcess, linker
from flexkv import c_ext
from flexkv.storage.header import DIGEST_AT, read_header
from tests.engines_sglang.conftest import OUTPUT_TOKENS, PROMPTS, request

BLOCK_TOKENS = 32
"""The smallest block of vLLM on a CPU; SGLang takes it as its page size."""

NAMES = ("a", "b")
CACHED = {name: (len(PROMPTS[name]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for name in NAMES}
SETTINGS = {
    "host.bytes": 48 << 20,
    "keys.scheme": "common",
    "disk.bytes_per_folder": 64 << 20,
    # What is asked here is what the disk serves, on a machine that may be busy.
    "disk.compute_if_faster": False,
    "load.lookup_wait_s": 30.0,
}
REST_DEADLINE_S = 60.0

# torch compiles in vLLM's process and takes CXX for one word; "ccache g++" is for our own build.
COMPILER = {"CXX": os.environ["CXX"].split()[-1]} if " " in os.environ.get("CXX", "") else {}


class Sglang:
    """A SGLang engine over the folder."""

    def __init__(self, model: Path, log: Path, disk: Path) -> None:
        settings: dict[str, Any] = {key.replace(".", "__"): value for key, value in SETTINGS.items()}
        arguments = linker(**settings, disk__folders=str(disk))
        self.process = SglangProcess(model, log, {**arguments, "page_size": BLOCK_TOKENS})

    def ask(self, name: str) -> tuple[list[int], int]:
        """The tokens, and how many of the prompt's were not computed."""
        [answer] = self.process.call("generate", requests=[request(name)])
        assert answer["finish"] == "length", answer
        return answer["tokens"], answer["cached"]


class Vllm:
    """A vLLM engine over the folder; without one it has no flexkv and no cache."""

    def __init__(self, model: Path, log: Path, disk: Path | None) -> None:
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
            extra = {**SETTINGS, "disk.folders": str(disk)}
            arguments["kv_transfer_config"] = {**FLEXKV, "kv_connector_extra_config": extra}
        environment = {**IN_PROCESS, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **COMPILER}
        self.process = EngineProcess(arguments, log, environment=environment)

    def ask(self, name: str) -> tuple[list[int], int]:
        """The tokens, and how many of the prompt's were not computed."""
        [answer] = self.process.generate([{"ids": PROMPTS[name], "max_tokens": OUTPUT_TOKENS}])
        assert answer["finish"] == "length", answer
        return answer["tokens"], answer["cached"] or 0


@contextmanager
def over(disk: Path | None, engine: Sglang | Vllm) -> Iterator[Sglang | Vllm]:
    """Ends the engine when what it stored is on disk."""
    try:
        yield engine
        if disk is not None:
            at_rest(disk)
    finally:
        engine.process.close()


def test_each_engine_is_served_what_the_other_stored(
    model: Path, reference: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    disk, spoiled = tmp_path / "disk", tmp_path / "spoiled"
    expected = {"sglang": {name: reference[name]["tokens"] for name in NAMES}}
    with over(None, Vllm(model, tmp_path / "vllm-plain.log", None)) as plain:
        expected["vllm"] = {name: plain.ask(name)[0] for name in NAMES}

    with over(disk, Sglang(model, tmp_path / "sglang-stores.log", disk)) as sglang:
        assert sglang.ask("a") == (expected["sglang"]["a"], 0)
    shutil.copytree(disk, spoiled)

    with over(disk, Vllm(model, tmp_path / "vllm-loads.log", disk)) as vllm:
        assert vllm.ask("a") == (expected["vllm"]["a"], CACHED["a"])
        assert vllm.ask("b") == (expected["vllm"]["b"], 0)

    with over(disk, Sglang(model, tmp_path / "sglang-loads.log", disk)) as sglang:
        assert sglang.ask("b") == (expected["sglang"]["b"], CACHED["b"])

    # The control: were pages rewritten in a wrong order, the answer would be another one.
    say_another_order(spoiled)
    with over(spoiled, Vllm(model, tmp_path / "vllm-spoiled.log", spoiled)) as vllm:
        tokens, cached = vllm.ask("a")
        assert cached == CACHED["a"]
        assert tokens != expected["vllm"]["a"]


def say_another_order(disk: Path) -> None:
    """The slab's header says heads outside tokens, where SGLang has tokens outside heads."""
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


def at_rest(disk: Path) -> None:
    """Waits until nothing in the folder has changed for two seconds."""
    ends_s, before, since_s = time.monotonic() + REST_DEADLINE_S, "", time.monotonic()
    while time.monotonic() - since_s < 2:
        assert time.monotonic() < ends_s, "the disk tier never came to rest"
        time.sleep(0.25)
        now = str(sorted((str(file), file.stat().st_mtime_ns) for file in disk.rglob("*") if file.is_file()))
        if now != before:
            before, since_s = now, time.monotonic()
