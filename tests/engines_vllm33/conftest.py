"""Fixtures of these tests. They run cases with flexkv and without it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from build_support.vllm33_environment import FOLDER, is_made
from demo.model import write_model
from tests.engines_vllm33.models import with_few_words, with_windows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CASE_DEADLINE_S = 280.0
LOG_TAIL = 5000

FLEXKV: dict[str, Any] = {
    "kv_connector": "FlexKVConnector",
    "kv_connector_module_path": "flexkv.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}

FAULTY = {
    **FLEXKV,
    "kv_connector": "FaultyConnector",
    "kv_connector_module_path": "tests.engines.faulty_connector",
}
"""A `kv_transfer_config` for flexkv's connector with a mover that follows the fault rules in FAULT_RULES."""

PROMISING: dict[str, Any] = {
    "kv_connector": "PromisingConnector",
    "kv_connector_module_path": "tests.engines.promising_connector",
    "kv_role": "kv_both",
}
"""A `kv_transfer_config` for a connector that promises tokens and does not load them."""

OFF: dict[str, Any] = {"async_scheduling": False}
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
RUNNER_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}

WHOLE_BLOCKS = [144, 64, 320]
"""Number of tokens in the full blocks of each of `cases.PROMPTS`, which have 150, 70 and 330 tokens."""

Found = dict[str, Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


def flexkv(base: Mapping[str, Any] = FLEXKV, **settings: Any) -> dict[str, Any]:
    """Makes a `kv_transfer_config` for flexkv. Callers give settings by their dotted names, with `__` for each dot."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return {**base, "kv_connector_extra_config": {"host.bytes": 1 << 26, "identity.model": "tiny", **named}}


def within_step(mode: str, base: Mapping[str, Any] = FLEXKV) -> dict[str, Any]:
    """Makes a `kv_transfer_config` for loads within the step. Async scheduling must be off. With Model Runner V2, a
    failed load must end its request, because this runner cannot reset a running request to an earlier position.
    Otherwise flexkv does not load within its steps.
    """
    return {**flexkv(base, load__mode=mode), "kv_load_failure_policy": "fail"}


def multi(*connectors: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a `kv_transfer_config` with several connectors. vLLM loads tokens from the first one that has them, and
    stores in all of them.
    """
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def environment(work: Path) -> dict[str, str]:
    """Returns the environment variables that every process of an engine needs."""
    paths = (HERE / "startup", FOLDER / "beside", FOLDER / "site", ROOT)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_VISIBLE_DEVICES": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # FlashInfer's kernels do not run on a CPU, so they must be off.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CACHE_ROOT": str(work / "vllm"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        # The models are tiny, so one thread suffices. These tests use no network except loopback.
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class Cases:
    """Runs cases one after the other. It keeps the results of cases without flexkv, to use them again.

    Attributes:
        work: folder for logs, models and caches.
        model: folder of the model of cases that have no `model` argument.
        windowed: folder of a model with two KV groups.
        laconic: folder of a model that soon repeats its own words.
    """

    def __init__(self, work: Path, model: Path) -> None:
        self.work, self.model = work, str(model)
        self.windowed = str(with_windows(model, work / "windowed"))
        self.laconic = str(with_few_words(model, work / "laconic"))
        self._count = 0
        self._alone: dict[str, Found] = {}
        with (work / "server.log").open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.engines_vllm33.server"],
                cwd=ROOT,
                env=environment(work),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def run(
        self,
        case: str,
        transfer: Mapping[str, Any] | None,
        environment: Mapping[str, str] | None = None,
        deadline_s: float = CASE_DEADLINE_S,
        **arguments: Any,
    ) -> Found:
        """Runs a case with `arguments` in a process of its own. Returns the case's result and its log.

        Raises:
            AssertionError: if the case failed; the error has the case's message and the end of its log.
        """
        self._count += 1
        log = self.work / f"{self._count}-{case}.log"
        order = {
            "case": case,
            "log": str(log),
            "environment": dict(environment or {}),
            "arguments": {"model": self.model, "transfer": transfer, **arguments},
        }
        assert self._server.stdin is not None
        self._server.stdin.write((json.dumps(order) + "\n").encode())
        self._server.stdin.flush()
        answer = self._answer(log, deadline_s)
        said = log.read_text(errors="replace") if log.exists() else ""
        assert "error" not in answer, f"{case}: {answer['error']}\n{said[-LOG_TAIL:]}"
        return {**answer["value"], "log": said}

    def alone(self, case: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> Found:
        """Runs the same case without flexkv. If it has run before, returns the earlier result."""
        key = json.dumps([case, environment, arguments], sort_keys=True)
        if key not in self._alone:
            self._alone[key] = self.run(case, None, environment, **arguments)
        return self._alone[key]

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(10.0)
        except subprocess.TimeoutExpired:
            # The server is the leader of its own session, so its process group has only the server and its children.
            os.killpg(self._server.pid, 9)
            self._server.wait()

    def _answer(self, log: Path, deadline_s: float) -> dict[str, Any]:
        assert self._server.stdout is not None
        descriptor, line = self._server.stdout.fileno(), b""
        ends_s = time.monotonic() + deadline_s
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, ends_s - time.monotonic()))
            more = os.read(descriptor, 1 << 16) if ready else b""
            if not more:
                said = log if log.exists() else self.work / "server.log"
                what = "the server of cases ended" if ready else f"no answer in {deadline_s:.0f} s"
                if not ready:
                    # The server is killed, because a late answer would be taken for the answer of the next case.
                    os.killpg(self._server.pid, 9)
                pytest.fail(f"{what}\n{said.read_text(errors='replace')[-LOG_TAIL:]}")
            line += more
        return dict(json.loads(line))


def skip_without_vllm() -> None:
    if not is_made():
        pytest.skip(f"{FOLDER.name} has no Python of vLLM 0.33: `make env-vllm33` gets it")


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    skip_without_vllm()
    work = tmp_path_factory.mktemp("vllm33")
    running = Cases(work, write_model(work / "models", "tiny"))
    yield running
    running.close()


def tokens(found: Found, phase: str) -> list[list[int]]:
    return list(found["phases"][phase]["tokens"])


def cached(found: Found, phase: str) -> list[int]:
    return list(found["phases"][phase]["cached"])


def assert_same_tokens(found: Found, alone: Found) -> None:
    """Asserts that each answer of each phase has the same tokens as without flexkv."""
    assert found["phases"].keys() == alone["phases"].keys()
    for phase in found["phases"]:
        assert tokens(found, phase) == tokens(alone, phase), phase
