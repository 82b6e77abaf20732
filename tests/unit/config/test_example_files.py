"""Every sample file lists all settings and can be loaded, and each of its lines has an effect. If a sample file is for
an engine, the classes and modules that it names exist.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from flexkv.cli.config_command import command
from flexkv.config import load_config
from flexkv.config.samples import ENGINE_FILES, SAMPLES, sample_text
from flexkv.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = [name for name in SAMPLES if name not in ENGINE_FILES]


def test_every_file_is_listed() -> None:
    folder = ROOT / "flexkv" / "config" / "samples"
    assert set(SAMPLES) == {path.name for path in folder.iterdir() if path.suffix in (".yaml", ".json")}
    assert (ROOT / "configs").resolve() == folder


@pytest.mark.parametrize("name", SETTINGS)
def test_every_line_of_a_sample_takes_effect(name: str, tmp_path: Path) -> None:
    path = tmp_path / "flexkv.yaml"
    path.write_text(sample_text(name))
    config = load_config(None, {"FLEXKV_CONFIG": str(path)})
    document = yaml.safe_load(path.read_text())
    given = [f"{section}.{field}" for section, fields in document.items() for field in fields]
    assert given
    for key in given:
        assert config.origin(key).startswith(f"file {path} line ")


def test_there_is_a_sample_with_gds_and_one_with_disks() -> None:
    def sections(name: str) -> set[str]:
        return set(yaml.safe_load(sample_text(name)))

    assert "gds" in sections("gds")
    assert "disk" in sections("disk")


def attached(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def test_vllm_takes_its_file() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    given = json.loads(sample_text("engine-vllm"))
    config = KVTransferConfig(**given)
    assert load_config(config.kv_connector_extra_config, {}) == load_config(None, {})
    assert KVConnectorFactory.get_connector_class(config) is attached(
        "flexkv.adapters.vllm", "FlexKVConnector"
    )
    with pytest.raises(ValueError, match="kv_role"):
        KVTransferConfig(**{**given, "kv_role": "kv_all"})


def test_vllms_command_line_takes_its_file() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--kv-transfer-config", sample_text("engine-vllm")])
    assert given.kv_transfer_config.kv_connector == "FlexKVConnector"


def test_tensorrt_llms_file_names_what_is_here() -> None:
    document = yaml.safe_load(sample_text("engine-tensorrt-llm"))
    connector = document["kv_connector_config"]
    for side in ("connector_scheduler_class", "connector_worker_class"):
        assert isinstance(attached(connector["connector_module"], connector[side]), type)
    page = (ROOT / "docs" / "tensorrt-llm.md").read_text()
    (shown,) = (block for block in page.split("```yaml\n")[1:] if "kv_connector_config" in block)
    assert yaml.safe_load(shown.partition("```")[0]) == document


def test_sglangs_file_names_the_linker() -> None:
    """SGLang's sample file names flexkv's linker class and module. This test needs no SGLang;
    tests/engines_sglang/test_own_flag.py reads the file with SGLang's own parser.
    """
    document = yaml.safe_load(sample_text("engine-sglang"))
    linker = json.loads(document["unified-cache-external-linker-config"])
    source = (ROOT / "flexkv" / "adapters" / "sglang" / "linker.py").read_text()
    assert linker["linker_module_path"] == "flexkv.adapters.sglang"
    assert f"class {linker['linker']}(" in source
    assert load_config(linker["linker_extra_config"], {}) == load_config(None, {})
    assert {f"--{name}" for name in document} <= set((ROOT / "docs" / "sglang.md").read_text().split())


@pytest.mark.parametrize("name", [*SAMPLES, "vllm", "engine-vllm"])
def test_the_command_prints_a_sample(name: str) -> None:
    done = CliRunner().invoke(command, ["sample", name])
    assert done.exit_code == 0, done.output
    assert done.output == sample_text(name)


def test_the_command_lists_the_samples_and_names_them_for_an_unknown_one() -> None:
    listed = CliRunner().invoke(command, ["samples"])
    assert all(name in listed.output for name in SAMPLES)
    with pytest.raises(
        ConfigError, match=r"no sample 'vlm': there are vllm.yaml, .*engine-tensorrt-llm.yaml"
    ):
        sample_text("vlm")
