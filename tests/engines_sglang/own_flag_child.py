"""Finds with which error SGLang's own connector fails with this package: that connector is for a different package that
is also named flexkv. Also finds how SGLang's argument parser reads the sample file that this package prints.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from flexkv.config.samples import sample_text

CONNECTOR = "sglang.srt.mem_cache.storage.flexkv.flexkv_connector"
"""The module that `--enable-flexkv` imports in the scheduler's process."""


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import_module(CONNECTOR)
        yield "import", {"error": ""}
    except Exception as error:
        yield "import", {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    yield "engine file", _arguments_of_sample()


def _arguments_of_sample() -> dict[str, Any]:
    """Reads the arguments in the sample file as `sglang serve --config` does."""
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sglang.yaml"
        path.write_text(sample_text("engine-sglang"))
        merged = ConfigArgumentMerger(parser).merge_config_with_args(
            ["--model-path", "m", "--config", str(path)]
        )
    given = parser.parse_args(merged)
    config = given.unified_cache_external_linker_config
    return {
        "enabled": given.enable_unified_cache_external_linker,
        "backend": given.unified_cache_external_linker_backend,
        "config": json.loads(config) if isinstance(config, str) else config,
    }
