"""Starts processes that are forked from the template, a process that has imported SGLang."""

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
"""Time limit, in seconds, for the template's imports. torch and SGLang take 15 s on two idle cores, but minutes on busy
ones."""


class Forked:
    """A process that was forked from the template, in a session of its own. It offers the part of `subprocess.Popen`'s
    interface that tests use.
    """

    def __init__(self, pid: int, ended: int) -> None:
        self.pid, self._ended = pid, ended
        self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process ends. Returns its exit code, or -1 if it was killed.

        Raises:
            subprocess.TimeoutExpired: if the process still runs after `timeout` seconds.
        """
        if self._handle >= 0:
            ready, _, _ = select.select([self._handle], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._handle)
            self._handle = -1
            # Children of this process may still have the pipe open, so a read of an empty pipe would block.
            ready, _, _ = select.select([self._ended], [], [], 0)
            said = os.read(self._ended, 16) if ready else b""
            os.close(self._ended)
            self._code = int(said) if said else -1
        return self._code


class Template:
    """The running template process. It ends when the process that started it ends."""

    def __init__(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked.settimeout(START_DEADLINE_S)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the template runs
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
        """Starts `program`: the name of a module, or Python text if `is_module` is False.

        Args:
            environment: all environment variables of the process. Those that SGLang reads when it is imported have no
                effect, because the template has imported it.
            output, errors: file descriptors for the process's standard output and error.
            descriptors: more file descriptors for the process. Their numbers in the process are its first arguments.
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
    """Returns the template of this test process. The first call starts it."""
    return Template()
