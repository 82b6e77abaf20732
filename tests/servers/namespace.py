"""A network namespace that has only the loopback interface, for servers that listen on all interfaces.

If the machine does not allow a namespace, the test is skipped, and the reason is shown. A process that is started with
`command` runs in the namespace and ends when its parent ends.
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
"""A program that enables the loopback interface, and keeps the namespace open until its input ends. It does not use
iproute2, which small container images lack.
"""

TOOLS = ("unshare", "nsenter", "setpriv")
"""The programs of util-linux that a namespace needs."""


class NoNamespace(Exception):
    """Raised if this user cannot make a network namespace on this machine. The message gives the reason."""


class Namespace:
    """A network namespace. It exists until `close` is called or this process ends.

    Attributes:
        pid: id of the process that keeps the namespace open.
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
        """Returns a command line that runs `argv` in the namespace. The process that executes it keeps its process id
        and inherited files, and is killed when the thread that started it ends.
        """
        enter = ["nsenter", "-t", str(self.pid), "-n", *(["-U", "--preserve-credentials"] * self._own_user)]
        # setpriv must come after nsenter, because a change of the user clears the signal that setpriv sets.
        return [*enter, "--", "setpriv", "--pdeathsig", "KILL", "--", *argv]

    def listens(self, port: int) -> bool:
        """Whether a process in the namespace listens on TCP port `port`."""
        lines = [
            line.split()
            for name in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{name}").read_text().splitlines()[1:]
        ]
        return any(int(line[1].rpartition(":")[2], 16) == port and line[3] == "0A" for line in lines)

    def close(self) -> None:
        """Ends the process that keeps the namespace open. The namespace exists until all other processes in it have
        ended, too. Idempotent.
        """
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
    """Yields a namespace. Skips the test if none can be made."""
    try:
        namespace = Namespace()
    except NoNamespace as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        yield namespace
    finally:
        namespace.close()
