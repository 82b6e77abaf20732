"""The child process of `EngineProcess`. It contains one vLLM engine, and runs one operation for each JSON message from
the parent.

The parent can pass the names of modules that add operations.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

Operation = Callable[..., dict[str, Any]]
"""An operation is called with the engine (`vllm.LLM`) and the message's arguments, and returns the content of the
reply.
"""

QUIET_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Workers are forked from a process that has already imported all modules. A spawned worker would import them again.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""Environment variables for all engines: no network, no telemetry, at most 1 GiB of KV cache."""

CLOSE = "close"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_ENGINE_LABELS = ("model_name", "engine")


class RequestTracker:
    """Adds requests to an engine, runs the engine's steps, and collects the tokens that the steps return."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self._results: dict[str, dict[str, Any]] = {}
        self._added_at: dict[str, float] = {}

    def add(
        self, name: str, request: dict[str, Any], embeddings: Any = None, lora_request: Any = None
    ) -> None:
        """Adds a request. Its keys are `ids` and optionally `max_tokens`, `salt`, `extra` (the sampling parameters'
        extra_args) and `logprobs`.

        If `logprobs` is true, the result contains the log probabilities of the chosen tokens.
        """
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": request["ids"]}
        if embeddings is not None:
            prompt = {"prompt_embeds": embeddings}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        params = SamplingParams(
            temperature=0,
            max_tokens=request.get("max_tokens", 1),
            ignore_eos=True,
            extra_args=request.get("extra"),
            logprobs=0 if request.get("logprobs") else None,
        )
        self._results[name] = {
            "tokens": [],
            "finish": None,
            "cached": None,
            "ttft_s": None,
            "prompt": len(request["ids"]),
        }
        self._added_at[name] = time.perf_counter()
        self.engine.add_request(name, prompt, params, lora_request=lora_request)

    def step(self) -> bool:
        """Runs one engine step. Returns False if no request was left to run."""
        if not self.engine.has_unfinished_requests():
            return False
        for output in self.engine.step():
            result = self._results[output.request_id]
            result["tokens"] = list(output.outputs[0].token_ids)
            if (given := output.outputs[0].logprobs) is not None:
                chosen = zip(result["tokens"], given, strict=True)
                result["logprobs"] = [position[token].logprob for token, position in chosen]
            if result["ttft_s"] is None and result["tokens"]:
                result["ttft_s"] = time.perf_counter() - self._added_at[output.request_id]
            if output.num_cached_tokens is not None:
                result["cached"] = output.num_cached_tokens
            if output.finished:
                result["finish"] = output.outputs[0].finish_reason
        return True

    def results(self) -> list[dict[str, Any]]:
        """Returns one result per request, in the order in which they were added."""
        return list(self._results.values())


def generate(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs the requests together until all have finished, and returns their results."""
    tracker = RequestTracker(llm)
    started = time.perf_counter()
    for number, request in enumerate(requests):
        tracker.add(f"r{number}-{time.monotonic_ns()}", request)
    while tracker.step():
        pass
    return {"requests": tracker.results(), "seconds": time.perf_counter() - started}


def reset(llm: Any, connector: bool = False, running: bool = False) -> dict[str, Any]:
    """Drops the engine's own prefix cache and, if `connector` is true, the connector's cache."""
    return {"done": bool(llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))}


def drain(llm: Any, deadline_s: float = 20.0) -> dict[str, Any]:
    """Runs steps of an engine whose scheduler is in this process, until the scheduler has no work left. A scheduler in
    a separate process runs such steps by itself.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    steps, ends_at = 0, time.monotonic() + deadline_s
    while scheduler.has_requests():
        if time.monotonic() > ends_at:
            left = [f"{name} {request.status.name}" for name, request in scheduler.requests.items()]
            return {"drained": False, "steps": steps, "left": left}
        llm.llm_engine.step()
        steps += 1
        time.sleep(0.001)
    return {"drained": True, "steps": steps}


def metrics(llm: Any, contains: str = "") -> dict[str, Any]:
    """Returns the values of the Prometheus series whose names contain the text `contains`. The keys have the form
    "name" or "name{label=value}".
    """
    from prometheus_client import REGISTRY

    values: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if contains not in sample.name or sample.name.endswith(("_bucket", "_created")):
                continue
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items() if k not in _ENGINE_LABELS)
            series = f"{sample.name}{{{labels}}}" if labels else sample.name
            values[series] = values.get(series, 0.0) + sample.value
    return {"values": values}


def processor_seconds(llm: Any) -> dict[str, Any]:
    """Returns the CPU time (user and system, all threads) that the engine's processes have used so far."""
    import psutil  # type: ignore[import-untyped]

    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    used = 0.0
    for member in family:
        times = member.cpu_times()
        used += times.user + times.system
    return {"seconds": used, "processes": len(family)}


def idle(llm: Any, seconds: float) -> dict[str, Any]:
    """Waits for `seconds`, and returns the CPU time that the engine's processes used in that time."""
    before, started = processor_seconds(llm)["seconds"], time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - started
    used = processor_seconds(llm)["seconds"] - before
    return {"seconds": elapsed, "cpu_seconds": used, "cpu_share": used / elapsed}


BASE_OPERATIONS: dict[str, Operation] = {
    "generate": generate,
    "reset": reset,
    "drain": drain,
    "metrics": metrics,
    "processor_seconds": processor_seconds,
    "idle": idle,
}


def _operations(modules: list[str]) -> dict[str, Operation]:
    operations = dict(BASE_OPERATIONS)
    for name in modules:
        operations |= importlib.import_module(name).OPERATIONS
    return operations


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent ends. An engine's parent is the fork server, which
    ends when the program that started the engine ends.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _compile_nothing() -> None:
    """On a CPU, turns off torch's compiler. vLLM compiles some functions, which it uses with several ranks and for log
    probabilities, even if `enforce_eager` is set. This compilation would take two seconds of CPU time in each process.
    """
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        torch.compiler.set_stance("force_eager")


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def serve(
    connection: Connection,
    engine: dict[str, Any],
    modules: list[str],
    environment: dict[str, str],
    paths: list[str],
    log: str,
) -> None:
    """Runs in the child process: starts the engine, replies, and then runs operations until it gets `CLOSE`."""
    os.setsid()  # makes a new process group, so that a stuck engine can be killed with all its workers
    die_with_parent()
    _redirect_output(log)
    os.environ.update(environment)
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])

    def reply(work: Callable[[], dict[str, Any]]) -> bool:
        try:
            content = {"ok": True, **work()}
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            content = {"ok": False, "error": message, "trace": traceback.format_exc()}
        connection.send_bytes(json.dumps(content).encode())
        return bool(content["ok"])

    operations: dict[str, Operation] = {}
    engines: list[Any] = []

    def start() -> dict[str, Any]:
        operations.update(_operations(modules))
        from vllm import LLM

        if engine.get("enforce_eager"):
            _compile_nothing()
        started = time.perf_counter()
        engines.append(LLM(**engine))
        return {"start_s": time.perf_counter() - started}

    def stop() -> dict[str, Any]:
        engines[0].llm_engine.engine_core.shutdown()
        return {}

    if not reply(start):
        return
    while True:
        command = json.loads(connection.recv_bytes())
        operation = command.pop("op")
        if operation == CLOSE:
            reply(stop)
            return
        reply(partial(_run, operations, operation, engines[0], command))


def _run(
    operations: dict[str, Operation], operation: str, llm: Any, arguments: dict[str, Any]
) -> dict[str, Any]:
    if operation not in operations:
        raise KeyError(f"no operation {operation!r}; there are {sorted(operations)}")
    return operations[operation](llm, **arguments)
