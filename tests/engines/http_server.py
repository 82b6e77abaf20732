"""Runs vLLM's API server as a user does, in its own processes on loopback. Tests talk to it over HTTP and stop it with
signals.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from demo.engine_child import QUIET_ENVIRONMENT, die_with_parent

START_DEADLINE_S = 240.0
ASK_DEADLINE_S = 60.0
END_DEADLINE_S = 60.0
LOG_TAIL_CHARACTERS = 4000
PORTS = range(20_000, 30_000)
"""Ports for servers. The kernel assigns none of them to other connections. This matters because a server binds its port
long after the test has found that it is free.
"""


class HttpServer:
    """A running API server, for use as a context manager. At the end of the `with` block, it kills the server and all
    processes that the server started, if they still run.
    """

    def __init__(
        self, model: Path, log: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._model, self._log = model, log
        self._port = free_port()
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            *options,
        ]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **QUIET_ENVIRONMENT, **environment},
                start_new_session=True,
                # When this process ends, even by a kill, the kernel sends SIGTERM to the server, and the server ends
                # its engine.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )

    def __enter__(self) -> HttpServer:
        ends_s = time.monotonic() + START_DEADLINE_S
        try:
            while not self._healthy():
                assert self._process.poll() is None, self.log_tail()
                assert time.monotonic() < ends_s, self.log_tail()
                time.sleep(0.2)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def complete(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Returns the greedy continuation of a prompt, as token ids."""
        [tokens] = self.complete_with(ids, max_tokens)
        return tokens

    def complete_with(self, ids: Sequence[int], max_tokens: int, **fields: Any) -> list[list[int]]:
        """Returns all continuations of a prompt that the server sends, as token ids. The server chooses tokens greedily
        unless `fields` says otherwise.

        Args:
            fields: more fields of the request's body.
        """
        asked = {
            "model": str(self._model),
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        } | fields
        choices = json.loads(self._fetch("/v1/completions", json.dumps(asked).encode()))["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends a POST request, with an empty body if `body` is None. Returns the response, which must be JSON."""
        sent = b"" if body is None else json.dumps(body).encode()
        answer: dict[str, Any] = json.loads(self._fetch(path, sent))
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a counter over all series that have the given labels."""
        return sum(self.series(name, **labels))

    def series(self, name: str, **labels: str) -> list[float]:
        """Returns the values of all series of a metric that have the given labels. Returns an empty result if there are
        none."""
        found = []
        for line in self._fetch("/metrics").decode().splitlines():
            series, _, value = line.rpartition(" ")
            wanted = (f'{label}="{text}"' in series for label, text in labels.items())
            if series.partition("{")[0] == name and all(wanted):
                found.append(float(value))
        return found

    def terminate(self) -> None:
        """Sends SIGTERM to the server's main process, as an init system does, and waits until all its processes have
        ended.
        """
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(END_DEADLINE_S)
        self._wait_for_group()

    def kill(self) -> None:
        """Sends SIGKILL to the server and every process that it started. Idempotent."""
        with contextlib.suppress(ProcessLookupError):  # in this case, all of its processes have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_DEADLINE_S)
        self._wait_for_group()

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]

    def _wait_for_group(self) -> None:
        ends_s = time.monotonic() + END_DEADLINE_S
        while time.monotonic() < ends_s:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        raise AssertionError(f"processes of the server outlive it: {self.log_tail()}")

    def _healthy(self) -> bool:
        try:
            self._fetch("/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _fetch(self, path: str, body: bytes | None = None) -> bytes:
        request: Any = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ASK_DEADLINE_S) as reply:
            content: bytes = reply.read()
        return content


def free_port() -> int:
    for port in random.sample(PORTS, 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"of 100 ports in {PORTS} none is free")
