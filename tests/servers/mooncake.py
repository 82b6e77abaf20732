"""Runs Mooncake's own servers in a network namespace: a master, and owners that contribute memory.

All servers are child processes of the test process, and end with it. Every wait has a time limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.servers.namespace import Namespace
from tests.servers.stopping import stop_all_threads

PORT = 50051
"""Port of the first master. The next port serves the master's metrics. No other process uses ports in the namespace."""
START_S = 20.0
"""Time limit, in seconds, for the start of a server. On an idle machine a master listens after 0.05 s."""
SEGMENT_MIB = 256

OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
code = client.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[1]) << 20, 0, "tcp", "", sys.argv[2])
print("ready" if code == 0 else f"code {code}", flush=True)
sys.stdin.read()
"""


def binary(name: str) -> str:
    """Returns the path of a program in Mooncake's wheel."""
    spec = find_spec("mooncake")
    assert spec is not None, "mooncake-transfer-engine-non-cuda is not installed: make env-test"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / name)


class Server:
    """A server process of the store.

    Attributes:
        log: file for the server's output.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        assert self._process is None, "it runs"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=dict(os.environ)
            )
        return self._process

    def pause(self) -> None:
        stop_all_threads(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process. Idempotent."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(START_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process = None


class Master(Server):
    """The master process, which knows the owner of each value. A restart loses this knowledge."""

    def __init__(self, namespace: Namespace, log: Path, port: int = PORT) -> None:
        super().__init__(log)
        self._namespace = namespace
        self.port = port
        self.url = f"mooncake://127.0.0.1:{port}"

    def start(self, *flags: str) -> None:
        command = [
            binary("mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.port + 1}",
            "--rpc_thread_num=2",
            "--enable_metric_reporting=false",
            "--logtostderr",
            *flags,
        ]
        process = self._spawn(self._namespace.command(command))
        until_s = time.monotonic() + START_S
        while not self._namespace.listens(self.port):
            assert process.poll() is None, f"mooncake_master ended: {self.log.read_text()[-2000:]}"
            assert time.monotonic() < until_s, (
                f"mooncake_master does not listen: {self.log.read_text()[-2000:]}"
            )
            time.sleep(0.01)


class Owner(Server):
    """A process that contributes a segment of memory to a store."""

    def __init__(self, namespace: Namespace, master: Master, log: Path, mib: int = SEGMENT_MIB) -> None:
        super().__init__(log)
        self._command = namespace.command([sys.executable, "-c", OWNER, str(mib), f"127.0.0.1:{master.port}"])

    def start(self) -> None:
        process = self._spawn(self._command)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said == b"ready\n", f"the owner said {said!r}: {self.log.read_text()[-2000:]}"


@contextmanager
def mooncake(
    namespace: Namespace, folder: Path, mib: int = SEGMENT_MIB, port: int = PORT, flags: Sequence[str] = ()
) -> Iterator[tuple[Master, Owner]]:
    """Runs a master and an owner within the `with` block, then kills both.

    Args:
        folder: folder for the logs.
        mib: size of the owner's segment in MiB.
        port: the master's port.
        flags: more options on the master's command line.
    """
    master = Master(namespace, folder / f"master-{port}.log", port)
    owner = Owner(namespace, master, folder / f"owner-{port}.log", mib)
    try:
        master.start(*flags)
        owner.start()
        yield master, owner
    finally:
        owner.kill()
        master.kill()
