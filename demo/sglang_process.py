"""Runs a real SGLang engine in a child process with its own environment, and passes calls to it. Every call has a
deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from build_support.sglang_environment import FOLDER

ROOT = Path(__file__).resolve().parents[1]
START_DEADLINE_S = 900.0
"""Seconds that an engine may take to start. Three processes import torch and SGLang, which takes half a minute on two
idle cores, and minutes on busy cores.
"""
CALL_DEADLINE_S = 300.0
CLOSE_DEADLINE_S = 60.0
LOG_TAIL_CHARACTERS = 5000

PAGE_TOKENS = 16
POOL_TOKENS = 2048

ENGINE = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "page_size": PAGE_TOKENS,
    "max_total_tokens": POOL_TOKENS,
    "max_running_requests": 4,
    "mem_fraction_static": 0.5,
    "context_length": 1536,
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    # Otherwise an idle scheduler would take a core from another engine on this machine.
    "sleep_on_idle": True,
    "random_seed": 1,
    "log_level": "info",
}
"""Engine arguments for SGLang on a machine without a GPU. They make the pool so small that tests can fill it."""

ENVIRONMENT = {
    # SGLang compiles with the ninja of its environment.
    "PATH": f"{FOLDER / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    # The model is tiny. Several threads would only wait for each other, and compiling a kernel would take longer than
    # all its runs.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # SGLang compiles its page hash at first use, and takes CXX as the name of one program. But for flexkv's build, CXX
    # may be "ccache g++".
    **({"CXX": os.environ["CXX"].split()[-1]} if " " in os.environ.get("CXX", "") else {}),
}


def child_environment(**more: str) -> dict[str, str]:
    """Returns the environment for SGLang's process: this process's variables without PYTHONPATH, because SGLang's
    Python has its own paths.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT | more


def linker(
    module: str = "flexkv.adapters.sglang", name: str = "FlexKVLinker", **settings: Any
) -> dict[str, Any]:
    """Returns engine arguments that make flexkv the external linker. `settings` are flexkv's settings, with `__` in
    place of the dot.
    """
    extra = {key.replace("__", "."): value for key, value in settings.items()}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": {
            "linker": name,
            "linker_module_path": module,
            "linker_extra_config": extra,
        },
    }


class Launched(Protocol):
    """A started process: the part of `subprocess.Popen` that `SglangProcess` uses."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...


class SglangProcess:
    """Starts an engine. As a context manager, it ends the engine at the end of the block.

    Raises:
        RuntimeError: there is no environment for SGLang, an operation failed, or the engine died or did not start or
            answer in time. The message contains the end of the log.
    """

    python = FOLDER / "bin" / "python"
    """The Python interpreter of SGLang's environment."""

    start_method = "spawn"
    """The `multiprocessing` start method of SGLang's processes. SGLang itself uses "spawn"; most tests use "fork",
    which saves a minute of imports on a busy core.
    """

    def __init__(self, model: Path, log: Path, arguments: Mapping[str, Any], **environment: str) -> None:
        if not self.python.exists():
            raise RuntimeError(f"{self.python} does not exist: `make env-sglang` makes SGLang's environment")
        self._log = log
        settings = {**ENGINE, "model_path": str(model), **arguments}
        theirs_in, self._orders = os.pipe()
        self._answers, theirs_out = os.pipe()
        environ = child_environment(**environment)
        with log.open("wb") as output:
            self._process = self.launched(
                (theirs_in, theirs_out), [json.dumps(settings), self.start_method], environ, output.fileno()
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        try:
            self._answer("start", START_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SglangProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def placed(self, command: Sequence[str]) -> Sequence[str]:
        """Returns the command line that starts `command`. Subclasses override this to run the engine elsewhere, such as
        in a namespace; the started process must keep its process id.
        """
        return command

    def launched(
        self, pipes: tuple[int, int], arguments: Sequence[str], environment: Mapping[str, str], output: int
    ) -> Launched:
        """Starts `demo.sglang_child` in a new session.

        Args:
            pipes: the file descriptor from which the child reads commands, and the one to which it writes replies.
            output: the file descriptor of the child's log.
        """
        command = [str(self.python), "-W", "ignore", "-m", "demo.sglang_child"]
        return subprocess.Popen(
            self.placed([*command, *map(str, pipes), *arguments]),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=pipes,
            start_new_session=True,
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """Runs one of the child's `Operations`, and returns its result."""
        order = json.dumps({"name": name, "arguments": arguments}) + "\n"
        os.write(self._orders, order.encode())
        return self._answer(name, CALL_DEADLINE_S)

    def close(self) -> None:
        """Ends the engine and all of its processes. Kills them if they do not end within a deadline. Idempotent."""
        if self._orders < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, b'{"name": "close"}\n')
        os.close(self._orders)
        os.close(self._answers)
        self._orders = -1
        try:
            self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            # The engine was started in a new session, so its process group has no other processes.
            os.killpg(self._process.pid, 9)
            self._process.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _answer(self, name: str, deadline_s: float) -> Any:
        ends_s = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, ends_s - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{name}: no answer within {deadline_s:.0f} s\n{self._tail()}")
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise RuntimeError(f"{name}: the engine's process ended\n{self._tail()}")
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{name}: {reply['error']}\n{self._tail()}")
        return reply["value"]

    def _tail(self) -> str:
        return self.log()[-LOG_TAIL_CHARACTERS:]
