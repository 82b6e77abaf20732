"""The cost benchmark times every hook of flexkv's connector. Other processes can read the sums of these times."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from benchmarks.costed_connector import HOOKS, CostedConnector
from benchmarks.hook_clock import FOLDER_VARIABLE, Costs, Ledger
from flexkv.adapters.vllm.connector import FlexKVConnector


def test_every_hook_of_a_step_is_timed() -> None:
    assert {"get_num_new_matched_tokens", "build_connector_meta", "start_load_kv", "wait_for_save"} <= set(
        HOOKS
    )
    for name in HOOKS:
        hook = getattr(FlexKVConnector, name)
        assert inspect.unwrap(getattr(CostedConnector, name)) is inspect.unwrap(hook)
        assert getattr(CostedConnector, name) is not getattr(FlexKVConnector, name)


def test_sums_are_read_by_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ledger = Ledger()
    ledger.names = ["first", "second", "third"]
    before = Costs.read(tmp_path)
    ledger.add(2, 0.25)
    ledger.add(2, 0.5)
    ledger.add(0, 1.0)
    assert {path.stem for path in tmp_path.iterdir()} == {str(os.getpid())}
    costs = Costs.read(tmp_path)
    assert costs.hooks == {"first": 1.0, "third": 0.75}
    assert costs.calls == {"first": 1, "third": 2}
    since = costs.since(before, requests=2)
    assert (since["hooks"], since["calls"]) == (0.875, 1.5)
