"""Two tables say for each setting which engines use it. flexkv warns if a user gives a setting that has no effect in
the engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.cli.info_facts import mode_hints
from flexkv.config import load_config, without_effect
from flexkv.config.engines import ENGINES, EVERYWHERE, PARTLY
from flexkv.config.model import FlexKVConfig, setting_fields
from flexkv.config.samples import sample_text

PACKAGE = Path(__file__).resolve().parents[3] / "flexkv"
NOT_FOR_ENGINES = ("config", "simulation", "cli", "blend")
SHARED = "shared"
SAMPLE_OF = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt_llm"}


def uses(key: str) -> dict[str, str]:
    """Returns for each engine "works", or the reason why the setting has no effect in it.

    Raises:
        KeyError: neither EVERYWHERE nor PARTLY has the setting, or both have it.
    """
    if (key in EVERYWHERE) == (key in PARTLY):
        raise KeyError(key)
    reasons = PARTLY.get(key, {})
    return {name: reasons[name].because if name in reasons else "works" for name in ENGINES}


def readers(key: str) -> set[str]:
    """Returns the engines whose adapters read the setting. The set also contains `SHARED` if code outside the adapters
    reads the setting."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        # Although `memory.py` belongs to the config package, it counts: it computes the size of host memory for all
        # engines.
        if (parts[0] not in NOT_FOR_ENGINES or path.name == "memory.py") and key in path.read_text():
            is_adapter = parts[0] == "adapters" and parts[1] in ENGINES
            found.add(parts[1] if is_adapter else SHARED)
    return found


@pytest.mark.parametrize("key", list(setting_fields()))
def test_each_setting_works_or_has_a_reason_in_each_engine(key: str) -> None:
    assert set(uses(key)) == set(ENGINES)


def test_control_a_setting_in_neither_table_or_in_both_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        uses("store.nonsense")
    monkeypatch.setitem(PARTLY, "host.bytes", {})
    with pytest.raises(KeyError):
        uses("host.bytes")


def test_the_tables_name_no_setting_that_there_is_not() -> None:
    assert EVERYWHERE | set(PARTLY) == set(setting_fields())
    assert all(set(engines) <= set(ENGINES) for engines in PARTLY.values())


@pytest.mark.parametrize("key", list(setting_fields()))
def test_what_only_one_adapter_reads_is_said_to_work_nowhere_else(key: str) -> None:
    found = readers(key)
    if SHARED in found or not found:
        return
    assert {name for name, use in uses(key).items() if use == "works"} == found


def test_control_a_setting_of_one_adapter_is_told_from_a_shared_one() -> None:
    assert readers("load.layer_hooks") == {"tensorrt_llm"}
    assert SHARED in readers("host.verify")


GIVEN = {
    "store.mode": "lazy",
    "store.tokens": "prompt",
    "store.generated_blocks": 8,
    "store.partial_blocks": True,
    "store.max_reference_share": 0.5,
    "store.hold_s": 5.0,
    "store.checkpoint_tokens": 512,
    "load.mode": "sync",
    "load.layer_hooks": "trust",
    "load.lookup_wait_s": 3,
    "load.prefetch_layers": 3,
    "disk.prefetch_requests": 4,
    "disk.compute_if_faster": True,
    "disk.stream": True,
    "blend.enabled": True,
    "blend.separators": " # # ",
    "blend.ratio": 0.3,
    "blend.min_tokens": 64,
    "blend.check_layer": 2,
    "blend.run_tokens": 16,
    "blend.bytes": "2GiB",
    "blend.disk_bytes": "4GiB",
    "gds.register_pool": "on",
    "observe.metrics_log_s": 5,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("key", GIVEN)
def test_a_setting_without_effect_is_named_once_with_its_reason(key: str, engine: str) -> None:
    said = without_effect(load_config({key: GIVEN[key]}, {}), engine)
    use = uses(key)[engine]
    if use == "works" or key == "disk.stream":  # the disk tier gives this warning itself
        assert said == []
        return
    (words,) = said
    assert words.startswith(f"{key}=")
    assert f"(engine extra config) has no effect in {ENGINES[engine]}: {use}" in words


def test_every_setting_that_is_partly_used_is_given_above() -> None:
    assert set(GIVEN) == set(PARTLY)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_nobody_gave_and_what_the_engine_does_anyhow_is_not_named(engine: str) -> None:
    assert without_effect(FlexKVConfig(), engine) == []
    assert without_effect(load_config({"disk.stream": False}, {}), engine) == []


def test_a_variable_of_the_environment_counts_as_given() -> None:
    (words,) = without_effect(load_config({}, {"FLEXKV_STORE_MODE": "lazy"}), "tensorrt_llm")
    assert "env FLEXKV_STORE_MODE" in words


@pytest.mark.parametrize(("name", "engine"), SAMPLE_OF.items())
def test_no_sample_has_a_setting_without_effect(name: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text(sample_text(name))
    assert without_effect(load_config({}, {"FLEXKV_CONFIG": str(path)}), engine) == []


@pytest.mark.parametrize(("mode", "told"), [("async", False), ("sync", True), ("layerwise", True)])
def test_flexkv_info_says_what_loads_within_the_step_need(mode: str, told: bool) -> None:
    hints = mode_hints(load_config({"load.mode": mode}, {}))
    assert len(hints) == told
    assert all("--no-async-scheduling" in words and "VLLM_USE_V2_MODEL_RUNNER=0" in words for words in hints)
