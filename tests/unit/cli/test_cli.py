"""Tests the commands of flexkv: their output and exit codes, and errors without a traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo.model import PRESETS, model_config
from flexkv.c_ext import eviction_policies
from flexkv.cache.manager import LocalCacheManager
from flexkv.cli.main import COMMANDS, main
from flexkv.errors import ContractError
from flexkv.weights import table
from flexkv.weights.files import FileState

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("FLEXKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def test_show_tells_value_and_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_HOST_BYTES", "40GiB")
    assert main(["config", "show", "--extra", '{"lazy_offload": true}']) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "42949672960 (40.0 GiB)" in lines["host.bytes"]
    assert "env FLEXKV_HOST_BYTES" in lines["host.bytes"]
    assert "lazy" in lines["store.mode"]
    assert "engine extra config" in lines["store.mode"]
    assert "default" in lines["load.mode"]


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["load.deadline_s"] == {"value": 30.0, "origin": "default"}


def test_show_prints_separators_of_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--extra", '{"blend.separators": ["# #", [1, 2]]}']) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert '["# #", [1, 2]]' in lines["blend.separators"]


def one_line(captured: tuple[str, str]) -> str:
    out, err = captured
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("{", "--extra: not valid JSON"),
        ("[]", "expected a JSON object"),
        (100_000 * "[", "--extra: lists or mappings in each other, too many to read"),
        ('{"host.byts": 1}', "'host.byts' from engine extra config (value 1): did you mean 'host.bytes'?"),
        ('{"host.bytes": "1 parsec"}', "1 parsec"),
        ('{"load.mode": "later"}', "'load.mode' from engine extra config has the value 'later'"),
        ('{"host": 3}', "'host' from engine extra config is a section"),
        ('{"lazy_offload": "perhaps"}', "expected true or false"),
        ('{"host.bytes": 4096, "cpu_bytes_to_use_per_rank": 4096}', "contradict each other"),
    ],
)
def test_errors_in_extra_settings_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], extra: str, words: str
) -> None:
    assert main(["config", "show", "--extra", extra]) == 2
    assert words in one_line(capsys.readouterr())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"host:\n  byts: 1\n", "line 2 (value 1): did you mean 'host.bytes'?"),
        (b"hosts:\n  bytes: 1\n", "did you mean 'host.bytes'?"),
        (b"host:\n  bytes: -4\n", "line 2 has the value -4"),
        (b"host: [1\n", "not valid YAML"),
        (b"- host\n", "line 1: expected a mapping of settings, got a sequence"),
        (b"\xff\xfe\x00", "cannot read the file"),
        (b"host:\n  bytes: 1\n  bytes: 2\n", "'host.bytes' was given on line 2 already"),
        (b"host:\n  bytes: !!python/object:os.system 1\n", "python/object"),
    ],
)
@pytest.mark.parametrize("command", [["config", "show"], ["info"]], ids=" ".join)
def test_errors_in_the_file_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: list[str],
    content: bytes | None,
    words: str,
) -> None:
    path = tmp_path / "flexkv.yaml"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("FLEXKV_CONFIG", str(path))
    assert main(command) == 2
    error = one_line(capsys.readouterr())
    assert words in error
    assert str(path) in error


@pytest.mark.parametrize(("value", "words"), [("", "set and empty"), ("~nobody-here/x.yaml", "~nobody-here")])
def test_a_path_that_is_none_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str, words: str
) -> None:
    monkeypatch.setenv("FLEXKV_CONFIG", value)
    assert main(["config", "show"]) == 2
    assert words in one_line(capsys.readouterr())


def test_a_folder_instead_of_a_file_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLEXKV_CONFIG", str(tmp_path))
    assert main(["info"]) == 2
    assert "expected a regular file, got a folder" in one_line(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["confg"], "No such command 'confg'. Did you mean 'config'?"),
        (["config", "nonsense"], "nonsense"),
        (["info", "--nonsense"], "--nonsense"),
        (["simulate", "--steps", "0"], "0 is not in the range"),
        (["simulate", "--failure-rate", "2"], "2.0 is not in the range"),
        (["simulate", "--failure-rate", "nan"], "nan is not in the range"),
        (["simulate", "--seed", "x"], "'x' is not a valid integer"),
    ],
)
def test_a_wrong_call_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


def test_a_native_core_that_was_not_built_is_one_line(tmp_path: Path) -> None:
    """If the native core was not built, a command prints one line that says how to build it. The test copies the
    package without its extension, as in a fresh clone. The copy must not find the extension of an editable install
    instead.
    """
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "flexkv", tmp_path / "flexkv", ignore=unbuilt)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)];"
            "from flexkv.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    done = run("simulate", "--steps", "1")
    assert done.returncode == 2
    assert "make build" in one_line((done.stdout, done.stderr))
    done = run("info")
    assert done.returncode == 1
    assert "problem: " in done.stdout
    assert "make build" in done.stdout
    assert json.loads(run("info", "--json").stdout)["native_core"] is None


def test_a_reader_that_has_gone_is_one_line_and_no_success() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flexkv", "config", "docs"]
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "error: standard output cannot be written: Broken pipe\n"


@pytest.mark.parametrize(
    ("target", "words"),
    [("> /dev/full", "cannot be written: No space left on device"), (">&-", "is closed")],
)
@pytest.mark.parametrize(
    "command",
    ["info", "info --json", "config show", "config docs", "simulate --steps 1", "--version", "fsck --help"],
)
def test_output_that_cannot_be_written_is_one_line_and_no_success(
    command: str, target: str, words: str
) -> None:
    line = f"{sys.executable} -m flexkv {command} {target}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"error: standard output {words}\n"


def test_characters_that_the_output_lacks_are_written_as_escapes() -> None:
    environ = {**os.environ, "FLEXKV_IDENTITY_NAMESPACE": "caf\u00e9", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "flexkv", "config", "show"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "caf\\xe9" in done.stdout


def test_the_module_is_the_command_and_has_no_traceback() -> None:
    environ = {**os.environ, "FLEXKV_HOST_BYTES": "1 parsec", "FLEXKV_DEBUG": "1"}
    command = [sys.executable, "-m", "flexkv", "config", "show"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=60)
    assert done.returncode == 2
    warning, error = done.stderr.splitlines()
    assert warning.startswith("environment variable FLEXKV_DEBUG")
    assert "env FLEXKV_HOST_BYTES" in error


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage: flexkv" in capsys.readouterr().out


INFO_KEYS: dict[str, set[str] | None] = {
    "flexkv": {"version", "folder", "others"},
    "python": None,
    "native_core": {"variant", "compiler", "with_cuda"},
    "cuda": {"devices", "driver", "reason"},
    "cufile": {"path", "found", "version", "reason"},
    "copy_ways": {"file", "tables"},
    "gds_pool": {"register_pool", "limits"},
    "cpus": {"usable", "total"},
    "gpu": {"packages", "devices", "reason"},
    "memory": {"usable_bytes", "total_bytes", "limited_by", "numa_nodes"},
    "huge_pages": {"private", "shared", "page_bytes", "free_pages"},
    "host_tier": {"bytes", "ranks", "numa_node"},
    "eviction": {"policy"},
    "disk_tier": {"mode", "io", "io_uring_refusal", "folders"},
    "model": None,
    "problems": None,
    "hints": None,
}
"""Keys of `flexkv info --json` that scripts may rely on."""


def test_info_is_json_with_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == set(INFO_KEYS)
    for section, keys in INFO_KEYS.items():
        assert keys is None or set(facts[section]) == keys
    assert facts["flexkv"]["folder"] == str(ROOT / "flexkv")
    assert 0 < facts["host_tier"]["bytes"] < facts["memory"]["usable_bytes"]
    assert facts["problems"] == []
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"`{section}`" in text for section in INFO_KEYS), "docs/configuration.md lists the keys"


@pytest.mark.parametrize(
    ("changes", "token_bytes"),
    [
        ({}, 2 * 4 * 2 * 64 * 4),
        ({"torch_dtype": "bfloat16"}, 2 * 4 * 2 * 64 * 2),
        ({"num_key_value_heads": None, "head_dim": None}, 2 * 4 * 4 * 64 * 4),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 4 * (512 + 64) * 4),
        # Three of four layers keep only a window of 2,048 tokens, which is a quarter of the longest prompt.
        (
            {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 2048},
            (4 + 3) * 2 * 2 * 64,
        ),
        (
            {"layer_types": ["full_attention"] + ["chunked_attention"] * 3, "attention_chunk_size": 2048},
            (4 + 3) * 2 * 2 * 64,
        ),
        ({"layer_types": ["full_attention"] * 4}, 2 * 2 * 64 * 4 * 4),
        ({"sliding_window": 2048}, 2 * 2 * 64 * 4),
        ({"sliding_window": 2048, "use_sliding_window": False}, 2 * 2 * 64 * 4 * 4),
    ],
)
def test_info_tells_what_the_host_tier_holds_of_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    token_bytes: int,
) -> None:
    config = model_config("LlamaForCausalLM", "llama", PRESETS["tiny"], head_dim=64)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    call = ["info", "--model", str(tmp_path)]
    monkeypatch.setenv("FLEXKV_HOST_BYTES", "1MiB")
    assert main([*call, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"]["token_bytes"] == token_bytes
    assert facts["model"]["prompt_tokens"] == 8192
    block_bytes = 16 * token_bytes
    assert facts["model"]["host_tokens"] == (1 << 20) // block_bytes * 16
    [short] = [hint for hint in facts["hints"] if "the host tier holds" in hint]
    assert f"set host.bytes to {8192 * token_bytes} (" in short
    monkeypatch.setenv("FLEXKV_HOST_BYTES", str(8192 * token_bytes))
    assert main(call) == 0
    shown = capsys.readouterr().out
    assert "1.0 prompts of 8192 tokens" in shown
    assert "hint: the host tier" not in shown


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "config.json cannot be read: No such file or directory\n"),
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "does not say what a token takes: it is []; expected a mapping"),
        ('{"torch_dtype": "int3"}', "int3"),
    ],
)
def test_a_model_without_sizes_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["info", "--model", str(tmp_path)]) == 2
    assert words in one_line(capsys.readouterr())


def test_a_pipe_in_place_of_the_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert main(["info", "--model", str(tmp_path)]) == 2
    assert "config.json is not a file" in one_line(capsys.readouterr())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0, "head_dim": None},
        {"num_attention_heads": float("inf")},
        {"num_attention_heads": True},
        {"num_key_value_heads": 0},
        {"head_dim": -64},
        {"head_dim": None, "hidden_size": 1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -2},
        {"num_hidden_layers": 1 << 30},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": -5},
        {"max_position_embeddings": 1 << 40},
        {"kv_lora_rank": "512", "qk_rope_head_dim": 64},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full_attention"},
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": None},
        {"full_attention_interval": 4},
        {"mamba_d_state": 16},
    ],
)
def test_model_with_a_size_that_is_none_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object]
) -> None:
    config = model_config("LlamaForCausalLM", "llama", PRESETS["tiny"], head_dim=64)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert main(["info", "--model", str(tmp_path)]) == 2
    said = one_line(capsys.readouterr())
    assert "does not say what a token takes" in said
    assert any(name in said for name in changes)


def test_info_shows_the_same_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("hint: ") == len(facts["hints"])
    assert f"{facts['flexkv']['version']} from {ROOT / 'flexkv'}" in shown
    for row in (
        "native core",
        "gpu extra",
        "cpus",
        "memory",
        "host tier",
        "eviction",
        "huge pages, private",
        "disk tier",
    ):
        assert re.search(rf"^{row}  +\S", shown, re.M), row


@pytest.mark.parametrize("policy", eviction_policies())
def test_info_shows_the_eviction_policy(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXKV_INDEX_POLICY", policy)
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eviction"] == {"policy": policy}
    assert main(["info"]) == 0
    assert re.search(rf"^eviction  +{policy} ", capsys.readouterr().out, re.M)


def test_info_describes_the_folders_of_the_disk_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = tmp_path / "file", tmp_path / "new" / "folder"
    file.touch()
    read = tmp_path / "model.bin"
    read.touch()
    monkeypatch.setattr(table, "YOUNG_NS", 0)
    table.WeightsTable(tmp_path).enter(read, FileState.of(read), "ab" * 32)
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk_tier"]["folders"] == []
    monkeypatch.setenv("FLEXKV_DISK_FOLDERS", f"{tmp_path}:{new}:{file}")
    assert main(["info", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    there, missing, broken = facts["disk_tier"]["folders"]
    assert there["path"] == str(tmp_path)
    assert (there["exists"], there["units"], there["held_bytes"], there["fault"]) == (True, 0, 0, "")
    assert there["named_files"] == 1
    assert 0 < there["free_bytes"] <= there["total_bytes"]
    assert (missing["exists"], missing["fault"]) == (False, "")
    assert not new.exists()
    assert broken["fault"] == f"{file} is no folder"
    assert facts["problems"] == [f"the engine would start without the disk {file}: {file} is no folder"]
    assert main(["info"]) == 1
    shown = capsys.readouterr().out
    assert "3 folder(s), disk.mode through" in shown
    assert "made at the engine's start" in shown
    assert "1 weights file(s) are named" in shown
    assert f"cannot be used: {file} is no folder" in shown


def test_tables_keep_their_cells_whole_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / ("long" * 30))
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FLEXKV_DISK_FOLDERS", folder)
    assert main(["config", "show"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("disk.folders")]
    assert row.split() == ["disk.folders", folder, "env", "FLEXKV_DISK_FOLDERS"]


def test_simulate_repeats_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for _ in range(2):
        assert main(["simulate", "--seed", "5", "--steps", "300", "--json"]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert runs[0] == runs[1]
    assert runs[0]["steps"] == 300
    assert main(["simulate", "--steps", "50"]) == 0
    assert "no rule broken" in capsys.readouterr().out


def test_simulate_names_seed_and_step_of_a_broken_rule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LocalCacheManager, request_id: str) -> None:
        raise ContractError("broken on purpose")

    monkeypatch.setattr(LocalCacheManager, "release", broken)
    assert main(["simulate", "--seed", "7", "--steps", "2000"]) == 1
    assert re.search(r"seed 7, after step \d+ of 2000.*broken on purpose", capsys.readouterr().err)
