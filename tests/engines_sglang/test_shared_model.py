"""What SGLang's models must be to share pages with other engines; no engine is started here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from build_support.sglang_environment import FOLDER
from demo.sglang_process import ENVIRONMENT, ROOT

DEADLINE_S = 600.0

PROGRAM = """
import json, sys
from types import SimpleNamespace
from flexkv.adapters.common.common_keys import common_namespace
from flexkv.adapters.sglang import identity
from flexkv.config import load_config
from flexkv.errors import ConfigError

identity.get_lora = lambda: SimpleNamespace(lora_paths=None)
settings = load_config({"keys.scheme": "common", "identity.model": "mine"}, {})
pool = SimpleNamespace(page_size=16)
place = identity.Place("dp0.pp0of1.tp0of1", 1, True)

def say(rope, file):
    arguments = SimpleNamespace(
        speculative_algorithm=None, decrypted_config_file=file, load_format="auto", random_seed=0,
        json_model_override_args="{}",
    )
    text = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": rope}})
    model = SimpleNamespace(
        is_multimodal=False, model_path=sys.argv[1], quantization=None, hf_text_config=text
    )
    try:
        shared = identity._shared_model(arguments, model, pool, place, settings, "torch.float16")
        return common_namespace(shared, settings).hex()
    except ConfigError as error:
        return str(error)

print(json.dumps([say("default", None), say("default", "/other.json"), say("longrope", None)]), flush=True)
"""


def test_models_that_others_would_compute_differently_are_refused(tmp_path: Path) -> None:
    environ = {**os.environ, **ENVIRONMENT}
    environ.pop("PYTHONPATH", None)
    command = [str(FOLDER / "bin" / "python"), "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plain, other_file, long_rope = json.loads(done.stdout.splitlines()[-1])
    assert len(bytes.fromhex(plain)) == 32
    assert "decrypted_config_file=/other.json is another configuration" in other_file
    assert "longrope" in long_rope
