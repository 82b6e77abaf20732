"""flexkv's entry point in `sglang.srt.plugins`. SGLang's own loader finds it. It makes flexkv the linker if the
engine's arguments name no linker.
"""

from __future__ import annotations

import json
from pathlib import Path

from demo.sglang_process import ENGINE
from tests.engines_sglang.child import run_child

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
    given = json.dumps({**ENGINE, "model_path": str(model)})
    found = [
        line["config"] for line in run_child("-c", PROGRAM, given, json.dumps(cases)) if "config" in line
    ]
    assert found == [{"linker": "FlexKVLinker", "linker_module_path": "flexkv.adapters.sglang"}, OTHER, None]
