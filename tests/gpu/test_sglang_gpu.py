"""Tests flexkv in a real SGLang engine on a GPU: a loaded prompt gives the same tokens as a computed one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from demo.model import prompt_tokens, write_model
from demo.sglang_process import SglangProcess, linker
from tests.gpu.needs import GPU

pytestmark = GPU
ENGINE = {"device": "cuda", "attention_backend": "triton", "dtype": "float32"}
TOKENS = 8
STORED_S = 30.0


class GpuSglang(SglangProcess):
    """Runs SGLang in the environment of the tests, instead of in a separate one."""

    python = Path(sys.executable)


@pytest.mark.timeout(600)
def test_loaded_tokens_are_those_that_were_computed(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="SGLang is not installed")
    model = write_model(tmp_path, "tiny")
    asked = [{"ids": prompt_tokens(333, stream), "tokens": TOKENS} for stream in range(3)]
    with GpuSglang(model, tmp_path / "plain.log", ENGINE) as engine:
        plain = [engine.call("generate", requests=[one])[0] for one in asked]
    told = ENGINE | linker(host__bytes=64 << 20)
    with GpuSglang(model, tmp_path / "flexkv.log", told) as engine:
        computed = [engine.call("generate", requests=[one])[0] for one in asked]
        ends_s = time.monotonic() + STORED_S
        loaded: list[dict[str, int]] = []
        # Stores finish a little after the answers. Until then, the engine computes the prompts again.
        while not (loaded and all(answer["host"] for answer in loaded)):
            assert time.monotonic() < ends_s, "nothing was loaded"
            assert engine.call("flush")
            loaded = [engine.call("generate", requests=[one])[0] for one in asked]
    for answers in (computed, loaded):
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in plain]
