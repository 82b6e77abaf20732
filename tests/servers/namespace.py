"""A separate network for servers that listen on all interfaces: a namespace with nothing but the loopback.

A test that cannot have one is skipped, and says so. A process started by `command` runs inside and ends with its
parent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

HOLDER = """
import fcntl, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
fcntl.ioctl(socket.socket(), SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
print("up", flush=True)
sys.stdin.read()
"""
"""Sets the loopback up without iproute2, which small images lack, and holds the namespace until its input ends."""

TOOLS = ("unshare", "nsenter", "setpriv")
"""Programs of util-linux."""


class NoNamespace(Exception):
    """This user cannot make a network namespace on this machine; says why."""


class Namespace:
    """A network namespace, open until `close` or the end of this process.

    Attributes:
        pid: id of the process that holds it.
    """

    def __init__(self) -> None:
        missing = [name for name in TOOLS if shutil.which(name) is None]
        if missing:
            raise NoNamespace(f"no {', '.join(missing)} on PATH")
        self._own_user = os.geteuid() != 0
        command = ["unshare", "-rn" if self._own_user else "-n", "--", sys.executable, "-c", HOLDER]
        self._holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != b"up\n":
            said = self._holder.stderr.read().decode(errors="replace").strip().splitlines()
            self.close()
            raise NoNamespace(said[-1] if said else "the holder of a network namespace ended")
        self.pid = self._holder.pid

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside. The process keeps its pid and inherited files, and is killed when
        the thread that started it ends."""
        enter = ["nsenter", "-t", str(self.pid), "-n", *(["-U", "--preserve-credentials"] * self._own_user)]
        # After nsenter: a change of user clears what setpriv sets.
        return [*enter, "--", "setpriv", "--pdeathsig", "KILL", "--", *argv]

    def listens(self, port: int) -> bool:
        """Whether some process inside listens on TCP port `port`."""
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]
        ]
        return any(int(line[1].rpartition(":")[2], 16) == port and line[3] == "0A" for line in lines)

    def close(self) -> None:
        """Ends the holder. Processes inside keep the namespace until they end. Idempotent."""
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()
        try:
            self._holder.wait(5.0)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


@contextmanager
def network_namespace() -> Iterator[Namespace]:
    """Yields a namespace, or skips the test."""
    try:
        namespace = Namespace()
    except NoNamespace as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        yield namespace
    finally:
        namespace.close()
