"""The clocks of the cost benchmark: every hook has one, and another process can read them."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from benchmarks.costed_connector import FOLDER_VARIABLE, HOOKS, CostedConnector, Costs, Ledger
from flexkv.adapters.vllm.connector import FlexKVConnector


def test_every_hook_of_a_step_is_timed() -> None:
    assert {"get_num_new_matched_tokens", "build_connector_meta", "start_load_kv", "wait_for_save"} <= set(
        HOOKS
    )
    for name in HOOKS:
        assert inspect.unwrap(getattr(CostedConnector, name)) is getattr(FlexKVConnector, name)
        assert getattr(CostedConnector, name) is not getattr(FlexKVConnector, name)


def test_sums_are_read_by_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    ledger = Ledger()
    ledger.add(2, 0.25)
    ledger.add(2, 0.5)
    ledger.add(0, 1.0)
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    costs = Costs.read(tmp_path)
    assert costs.hooks == {HOOKS[0]: 1.0, HOOKS[2]: 0.75}
    assert costs.calls == {HOOKS[0]: 1, HOOKS[2]: 2}
