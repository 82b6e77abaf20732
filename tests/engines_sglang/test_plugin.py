"""The entry point `sglang.srt.plugins`: SGLang's own loader finds it; flexkv is named where no linker is."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from build_support.sglang_environment import FOLDER
from demo.sglang_process import ENGINE, ENVIRONMENT, ROOT

DEADLINE_S = 900.0

PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs
for more in json.loads(sys.argv[2]):
    arguments = ServerArgs(**json.loads(sys.argv[1]), **more)
    arguments.resolve_once()
    print(json.dumps({"config": resolving_view(arguments).unified_cache_external_linker_config}), flush=True)
"""

DYNAMIC = {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic"}
OTHER = {"linker": "Other", "linker_module_path": "another.module"}


def test_flexkv_is_the_dynamic_linker_where_no_other_is_named(model: Path) -> None:
    cases = [DYNAMIC, DYNAMIC | {"unified_cache_external_linker_config": OTHER}, {}]
    command = [str(FOLDER / "bin" / "python"), "-W", "ignore", "-c", PROGRAM]
    command += [json.dumps({**ENGINE, "model_path": str(model)}), json.dumps(cases)]
    environ = {**os.environ, **ENVIRONMENT}
    environ.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line)["config"] for line in done.stdout.splitlines() if line.startswith('{"config"')]
    assert found == [{"linker": "FlexKVLinker", "linker_module_path": "flexkv.adapters.sglang"}, OTHER, None]
