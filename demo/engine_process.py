"""Runs a vLLM engine in a child process and passes calls to it. Every call has a deadline."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from demo.engine_child import CLOSE, serve

START_DEADLINE_S = 240.0
"""Seconds that an engine may take to start. With two worker processes the start takes about 14 s on two idle cores, and
longer on busy cores.
"""
CALL_DEADLINE_S = 90.0
CLOSE_DEADLINE_S = 15.0
LOG_TAIL_CHARACTERS = 6000

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Environment that puts the scheduler into the engine's main process, where operations can reach the block pool.
The engine then starts in a few seconds.
"""
SEPARATE_CORE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Environment that puts the scheduler into its own process with a busy loop, as in a deployment."""

FLEXKV = {
    "kv_connector": "FlexKVConnector",
    "kv_connector_module_path": "flexkv.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""vLLM's `kv_transfer_config` for flexkv, as a user would write it."""


class EngineError(RuntimeError):
    """Raised if an operation failed, or if the engine died or did not answer in time. The message contains the end of
    the engine's log.
    """


def engine_arguments(
    model: Path, connector: Mapping[str, Any] | None, block_tokens: int, pool_blocks: int
) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM` for an engine of the demo.

    Args:
        connector: the engine's `kv_transfer_config`; None for an engine without a connector.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "block_size": block_tokens,
        "num_gpu_blocks_override": pool_blocks,
        "disable_log_stats": False,
    }
    return arguments if connector is None else arguments | {"kv_transfer_config": dict(connector)}


class EngineProcess:
    """Starts an engine and passes operations to it. As a context manager, it closes the engine at the end of the block.

    Args:
        engine: keyword arguments of `vllm.LLM`.
        log: the file to which the engine's stdout and stderr are appended.
        operations: names of modules whose OPERATIONS the child process can run too.
        environment: environment variables of the engine, in addition to those of the fork server. The fork server has
            the variables of this process and `QUIET_ENVIRONMENT`.
        paths: additional folders in which the engine's processes look for modules, such as a module of operations or of
            a connector.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        log: Path,
        operations: Sequence[str] = (),
        environment: Mapping[str, str] = IN_PROCESS,
        paths: Sequence[Path] = (),
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["demo.engine_preload"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(theirs, dict(engine), list(operations), dict(environment), [*map(str, paths)], str(log)),
            name="engine",
        )
        self._process.start()
        theirs.close()
        self._open = True
        try:
            self.started = self._answer(start_deadline_s, "start")
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._open and self._process.is_alive()

    def call(self, operation: str, deadline_s: float = CALL_DEADLINE_S, **arguments: Any) -> dict[str, Any]:
        """Runs one operation and returns its reply.

        Raises:
            EngineError: the operation failed, the engine died, or the deadline passed. If the deadline passed, the
                engine has been killed.
        """
        if not self._open:
            raise EngineError(f"{operation}: the engine was closed")
        return self._exchange({"op": operation, **arguments}, deadline_s, operation)

    def generate(
        self, requests: Sequence[Mapping[str, Any]], deadline_s: float = CALL_DEADLINE_S
    ) -> list[dict[str, Any]]:
        """Runs requests together. Returns one result per request, with the keys tokens, finish, cached and ttft_s."""
        reply = self.call("generate", deadline_s, requests=[dict(request) for request in requests])
        results: list[dict[str, Any]] = reply["requests"]
        return results

    def metrics(self, contains: str = "") -> dict[str, float]:
        values: dict[str, float] = self.call("metrics", contains=contains)["values"]
        return values

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]

    def close(self) -> None:
        """Shuts the engine down, and kills it if that takes too long. Idempotent."""
        if not self._open:
            return
        with contextlib.suppress(EngineError):
            self._exchange({"op": CLOSE}, CLOSE_DEADLINE_S, CLOSE)
        self._process.join(CLOSE_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """Kills the engine and every process that it started. Idempotent."""
        if not self._open:
            return
        self._open = False
        assert self._process.pid is not None
        # The process itself is killed first. Before it has called setsid, it belongs to the fork server's process
        # group, which must not be killed.
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._connection.close()

    def _exchange(self, command: dict[str, Any], deadline_s: float, name: str) -> dict[str, Any]:
        try:
            self._connection.send_bytes(json.dumps(command).encode())
        except OSError:
            raise EngineError(f"{name}: the engine has died\n{self.log_tail()}") from None
        return self._answer(deadline_s, name)

    def _answer(self, deadline_s: float, name: str) -> dict[str, Any]:
        if not self._connection.poll(deadline_s):
            self.kill()
            raise EngineError(f"{name}: no answer within {deadline_s:g} s\n{self.log_tail()}")
        try:
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except EOFError:
            self._process.join(CLOSE_DEADLINE_S)
            raise EngineError(
                f"{name}: the engine died with status {self._process.exitcode}\n{self.log_tail()}"
            ) from None
        if not reply.pop("ok"):
            raise EngineError(f"{name}: {reply['error']}\n{reply['trace']}\n{self.log_tail()}")
        return reply
