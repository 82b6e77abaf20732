"""Conditions under which an SGLang model shares pages with other engines. These tests start no engine."""

from __future__ import annotations

from pathlib import Path

from tests.engines_sglang.child import run_child

PROGRAM = """
import json, sys
from types import SimpleNamespace
from flexkv.adapters.common.common_keys import common_namespace
from flexkv.adapters.sglang import identity
from flexkv.config import load_config
from flexkv.errors import ConfigError

identity.get_lora = lambda: SimpleNamespace(lora_paths=None)
settings = load_config({"keys.scheme": "common", "identity.model": "mine"}, {})
pool = SimpleNamespace(block_tokens=16)
place = identity.Place("dp0.pp0of1.tp0of1", 1, True)

def say(rope, file, place=place, exact=False, target=None):
    arguments = SimpleNamespace(
        speculative_algorithm=None, decrypted_config_file=file, load_format="auto", random_seed=0,
        json_model_override_args="{}", enable_deterministic_inference=exact, rl_on_policy_target=target,
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

ranks = [identity.Place(f"dp0.pp0of1.tp{rank}of2", 2, False) for rank in (0, 1)]
said = {
    "plain": say("default", None),
    "other file": say("default", "/other.json"),
    "long rope": say("longrope", None),
    "kernels": [say("default", None, exact=True), say("default", None, exact=True, target="fsdp")],
    "ranks": [say("default", None, rank) for rank in ranks],
}
print(json.dumps(said), flush=True)
"""


def test_models_that_others_would_compute_differently_are_refused(tmp_path: Path) -> None:
    [said] = run_child("-c", PROGRAM, str(tmp_path))
    assert len(bytes.fromhex(said["plain"])) == 32
    assert "decrypted_config_file=/other.json is another configuration" in said["other file"]
    assert "longrope" in said["long rope"]
    # Modes whose kernels give different bits have different keys.
    assert len({said["plain"], *said["kernels"]}) == 3
    # A rank's pages contain only its heads, so their keys differ from those of other ranks and of an unsplit model.
    assert len({said["plain"], *said["ranks"]}) == 3
