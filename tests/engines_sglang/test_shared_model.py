"""Conditions under which an SGLang model shares pages with other engines. These tests start no engine."""

from __future__ import annotations

from pathlib import Path

from tests.engines_sglang.child import run_child

PROGRAM = """
import json, sys
from types import SimpleNamespace
from msgspec.structs import fields
from sglang.srt.server_args import ServerArgs
from flexkv.adapters.common.common_keys import common_namespace
from flexkv.adapters.sglang import identity
from flexkv.config import load_config
from flexkv.errors import ConfigError

identity.get_lora = lambda: SimpleNamespace(lora_paths=None)
settings = load_config({"keys.scheme": "common", "identity.model": "mine"}, {})
pool = SimpleNamespace(block_tokens=16)
place = identity.Place("dp0.pp0of1.tp0of1", 1, True)
usual = {field.name: field.default for field in fields(ServerArgs)}

def say(rope, file, place=place, exact=False, target=None, **given):
    arguments = SimpleNamespace(**usual | given)
    arguments.decrypted_config_file, arguments.random_seed = file, 0
    arguments.enable_deterministic_inference, arguments.rl_on_policy_target = exact, target
    text = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_type": rope}})
    model = SimpleNamespace(
        is_multimodal=False, model_path=sys.argv[1], revision=None, quantization=None, hf_text_config=text
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
others = {
    "experts": dict(moe_runner_backend="marlin"),
    "model": dict(model_impl="transformers"),
    "files": dict(load_format="pt"),
    "same files": dict(load_format="runai_streamer"),
    "remote code": dict(trust_remote_code=True),
}
said["settings"] = {name: say("default", None, **given) for name, given in others.items()}
with identity.envs.SGLANG_FORCE_FP8_MARLIN.override(True):
    said["settings"]["variable"] = say("default", None)
with open(f"{sys.argv[1]}/model.py", "w") as code:
    code.write("x = 1")
said["settings"]["remote code of a file"] = say("default", None, trust_remote_code=True)
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
    # Arguments, Python files and environment variables that change KV change the keys, too. Remote code without a file
    # does not.
    settings = dict(said["settings"])
    assert settings.pop("remote code") == settings.pop("same files") == said["plain"]
    assert len({said["plain"], *settings.values()}) == 6
