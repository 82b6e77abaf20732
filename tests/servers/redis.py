"""A real Redis server on a free port of this machine. It writes no data to disk, and ends when the test ends, even if
the test is killed.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from demo.engine_child import die_with_parent
from tests.servers.stopping import stop_all_threads

START_DEADLINE_S = 30.0
MOST_BYTES = 512 << 20


class RedisServer:
    """A Redis server in a process of its own.

    Args:
        folder: folder for the server's log.
        options: more options on the server's command line.
        port: the server's port; 0 for a free one.
        tls: whether the server uses TLS on its port; `options` must have the certificates.
        maxmemory: bytes of memory beyond which the server refuses further values.

    Attributes:
        url: the server's URL for `remote.urls`.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = (),
        port: int = 0,
        tls: bool = False,
        maxmemory: int = MOST_BYTES,
    ) -> None:
        self._folder, self._options, self._tls = folder, list(options), tls
        self._maxmemory = maxmemory
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts the server and waits until it accepts connections."""
        ports = ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        command = [program(self._folder), *ports, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += [
            "--maxmemory",
            str(self._maxmemory),
            "--maxmemory-policy",
            "noeviction",
            "--daemonize",
            "no",
        ]
        command += ["--dir", str(self._folder), *self._options]
        log = self._folder / f"redis-{self.port}.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, preexec_fn=die_with_parent
            )
        ends_s = time.monotonic() + START_DEADLINE_S
        while not self._listens():
            running = self._process.poll() is None
            if not running or time.monotonic() >= ends_s:
                self.stop()
                raise AssertionError(log.read_text())
            time.sleep(0.01)

    def stop(self) -> None:
        """Kills the server, even if it is frozen. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stops all threads of the server. Its connections stay open, and the kernel accepts new connections, but the
        server does not answer.
        """
        assert self._process is not None
        stop_all_threads(self._process.pid)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> bytes:
        """Sends one command on a new connection. Returns the raw answer, which must be one line or one short value."""
        line = b"".join(b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words)
        with socket.create_connection(("127.0.0.1", self.port), 10.0) as other:
            other.sendall(b"*%d\r\n" % len(words) + line)
            return other.recv(4096)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False


@contextlib.contextmanager
def redis_server(
    folder: Path, options: Sequence[str] = (), port: int = 0, tls: bool = False, maxmemory: int = MOST_BYTES
) -> Iterator[RedisServer]:
    server = RedisServer(folder, options, port, tls, maxmemory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def program(folder: Path) -> str:
    """Returns the path of the Redis server program. If only Debian's package of Redis tools is installed, makes a link
    to a tool in `folder`. The tool is the same program, and acts as a server if it is called by the server's name.
    """
    found = shutil.which("redis-server")
    if found is not None:
        return found
    other = shutil.which("redis-check-rdb")
    assert other is not None, "neither redis-server nor redis-check-rdb is on PATH: make preflight-test"
    link = folder / "redis-server"
    if not link.exists():
        link.symlink_to(other)
    return str(link)


def free_port() -> int:
    """Returns a port that is free during the call. The kernel may give the port to a connection before the server binds
    it. Then the server reports an error.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
