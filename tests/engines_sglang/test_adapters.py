"""flexkv's names for the adapters in `--lora-paths`. flexkv makes them from SGLang's own records of the adapters.

These tests start no engine, because SGLang 0.5.23 runs no adapter on a CPU: its LoRA layers need pinned memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.engines.lora_files import write_lora
from tests.engines_sglang.child import run_child

PROGRAM = """
import json, sys
from types import SimpleNamespace
from sglang.srt.lora.lora_registry import LoRARef
from flexkv.adapters.sglang import identity
from flexkv.errors import ConfigError

path = sys.argv[1]
number = LoRARef.deterministic_id("mine", path)
ref = LoRARef(lora_id=number, lora_name="mine", lora_path=path)
identity.get_lora = lambda: SimpleNamespace(lora_paths=[ref])
known = identity._adapters()
with open(path + "/adapter_config.json", "a") as settings:
    settings.write(" ")
try:
    identity._adapters()
    said = ""
except ConfigError as error:
    said = str(error)
print(json.dumps({"number": number, "known": known, "changed": said}), flush=True)
"""


def ask(folder: Path) -> dict[str, object]:
    """Starts a process that names an adapter and then changes the adapter's files. Returns SGLang's number for the
    adapter, flexkv's name for it, and flexkv's error after the change.
    """
    return run_child("-c", PROGRAM, str(folder))[-1]


def test_an_adapter_trained_anew_has_another_name_under_the_same_number(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    write_lora(folder, 1)
    first = ask(folder)
    shutil.rmtree(folder)
    write_lora(folder, 2)
    second = ask(folder)
    assert first["number"] == second["number"], "what SGLang's page hashes hold"
    assert first["known"] != second["known"]
    assert list(first["known"]) == list(second["known"]) == [f"mine={folder}"]  # type: ignore[call-overload]
    assert "changed after the engine's start" in str(first["changed"])
