"""Runs the adapter's unit tests with the Python code of vLLM 0.33. They cover the names of vLLM that the adapter uses,
its hooks, the settings in its keys, and its work on vLLM's own objects and scheduler.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines_vllm33.conftest import ROOT, environment, skip_without_vllm

ADAPTERS = "tests/unit/adapters"
QUICK = (
    "test_connector_interface.py",
    "test_engine_checks.py",
    "test_events_and_stats.py",
    "test_identity_fields.py",
    "test_request_fields.py",
    "test_request_settings.py",
    "test_roles_and_resets.py",
    "test_store_and_load.py",
    "test_vllm_names.py",
)

OF_A_CPU = (
    "test_blend_rows.py::test_runs_are_longer_on_a_gpu_unless_a_length_is_given",
    "test_geometry.py::test_one_group_of_full_attention_is_served",
    "test_geometry.py::test_on_a_cpu_no_layout_is_asked_for_because_there_is_one_only",
    "test_identity.py::test_a_report_of_another_unit_frees_and_publishes_nothing",
    "test_late_reports.py::test_an_early_store_of_a_block_that_is_cleared_first_is_void",
    "test_layer_stores.py::test_blocks_that_are_handed_out_under_a_copy",
    "test_sleep.py::test_a_reset_fails_while_other_processes_copy",
)
"""Tests that need vLLM's CPU platform, or that check the name of a device. In this environment the platform is CUDA,
although its tensors are on the CPU.
"""

OF_RUNNER_V1 = (
    "test_model_runners.py::test_a_failed_load_is_computed",
    "test_model_runners.py::test_nothing_wrong_is_read_whatever_clients_do",
)
"""Tests in which a request is recomputed after a load within the step has failed. Model Runner V2, the default on a
GPU, cannot do this."""

NEW_PROCESSES = ("test_plugin.py",)
"""Tests that check which modules a new process imports. They would fail, because the mock imports vLLM first."""

AS_HERE = ("test_vllm_names.py::test_what_the_adapter_reads_while_it_runs_is_listed",)
"""A test that runs other tests, as `run_units` does."""


def run_units(work: Path, *arguments: str) -> None:
    """Runs tests in a process with vLLM 0.33. The plugin makes a test fail if it reads a name of vLLM that is not in
    the list.
    """
    skip_without_vllm()
    variables = {name: value for name, value in environment(work).items() if not name.startswith("PYTEST_")}
    left_out = (f"--deselect={ADAPTERS}/{name}" for name in (*OF_A_CPU, *OF_RUNNER_V1, *AS_HERE))
    plugin = ("-p", "tests.unit.adapters.attribute_reads")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *left_out, *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]


@pytest.mark.timeout(900)
def test_names_hooks_and_settings(tmp_path: Path) -> None:
    run_units(tmp_path, *(f"{ADAPTERS}/{name}" for name in QUICK))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_others(tmp_path: Path) -> None:
    run_units(tmp_path, *(f"--ignore={ADAPTERS}/{name}" for name in (*QUICK, *NEW_PROCESSES)), ADAPTERS)
