"""Starts processes from the template that has imported SGLang."""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from build_support.sglang_environment import FOLDER
from demo.sglang_process import ROOT, child_environment
from tests.engines_sglang.template import ORDER_BYTES

START_DEADLINE_S = 900.0
"""Importing torch and SGLang takes 15 s on two idle cores, minutes if other processes use them."""


class Forked:
    """A process of the template, in a session of its own. Like `subprocess.Popen`, as far as tests use that."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid, self._ended = pid, ended
        self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end. Returns the exit code; -1 if the process was killed.

        Raises:
            subprocess.TimeoutExpired: it is still there.
        """
        if self._handle >= 0:
            ready, _, _ = select.select([self._handle], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._handle)
            self._handle = -1
            # Processes that it has forked may still have the pipe.
            ready, _, _ = select.select([self._ended], [], [], 0)
            said = os.read(self._ended, 16) if ready else b""
            os.close(self._ended)
            self._code = int(said) if said else -1
        return self._code


class Template:
    """The running template. It ends with the process that has started it."""

    def __init__(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.settimeout(START_DEADLINE_S)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the template
        command = [str(FOLDER / "bin" / "python"), "-W", "ignore", "-m", "tests.engines_sglang.template"]
        subprocess.Popen(
            [*command, str(theirs.fileno())],
            cwd=ROOT,
            env=child_environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        errors: int,
        descriptors: Sequence[int] = (),
        is_module: bool = True,
    ) -> Forked:
        """Starts `program`, a module or else Python text.

        Args:
            environment: all of the process's variables; those that SGLang reads at its import come too late.
            descriptors: the numbers that these have in the process are its first arguments.
        """
        order = json.dumps(
            {
                "program": program,
                "arguments": list(arguments),
                "environment": dict(environment),
                "is_module": is_module,
            }
        ).encode()
        assert len(order) <= ORDER_BYTES
        ended, theirs = os.pipe()
        socket.send_fds(self._asked, [order], [output, errors, theirs, *descriptors])
        os.close(theirs)
        answer = self._asked.recv(32)
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"the template ended: {self._log.read()[-4000:].decode(errors='replace')}")
        return Forked(int(answer), ended)


@functools.cache
def template() -> Template:
    """The template of this worker's tests."""
    return Template()
