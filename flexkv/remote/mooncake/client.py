"""One client of Mooncake's library, which is set up when its master is alive, and never called while the master is
known to be away.

The library cannot be interrupted and forgives little: a call on a client that is not set up, or was closed, ends the
process with SIGSEGV, and with a dead master each call waits 4.3 s. So `Client` keeps a connection of its own to the
master, on which it sends nothing: the connection's end shows that the master has died, at the cost of one system call.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from flexkv.errors import ClosedError, StoreError
from flexkv.remote.base import Part

CLIENT_ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # otherwise a setup without a master takes 90 s
    "MC_RPC_TIMEOUT_MS": "1000",  # otherwise a stopped master blocks a call for 30 s
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",  # otherwise a stopped owner blocks it for 30 s per value
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_LANES_PER_PEER": "8",  # with fewer lanes than values, a call waits for a stopped owner repeatedly
}
"""Variables for a process that opens this store. They are set at its start, because the library reads them once. Values
that an operator has set win: `{**CLIENT_ENVIRONMENT, **environment}`.
"""

AGAIN_S = 0.5
"""After a failed attempt to reach the master, calls fail at once for this many seconds, without another attempt."""

ADVICE = "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1; it needs the system's libibverbs1 too"

UNREACHABLE = frozenset({-900, -901})
"""The library's codes for a master that cannot be reached, and for one that does not answer."""


def load_library(master: str) -> Any:
    """The library's class of clients.

    Raises:
        StoreError: the library cannot be loaded, or a variable of CLIENT_ENVIRONMENT is not set.
    """
    missing = [name for name in CLIENT_ENVIRONMENT if name not in os.environ]
    if missing:
        raise StoreError(
            f"{master}: Mooncake's library reads {', '.join(missing)} from the environment, once: start the process "
            "with CLIENT_ENVIRONMENT"
        )
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StoreError(f"{master}: Mooncake's library does not load ({error}): {ADVICE}") from error
    return MooncakeDistributedStore


class Client:
    """A pure client: it contributes no memory to the store.

    Args:
        host, port: address of the master's RPC.
        connect_s: longest time to connect to it, in seconds; setting the library up takes one round trip or
            MC_RPC_TIMEOUT_MS more.
        devices: RDMA devices; empty for TCP.

    Attributes:
        why: why there is no client, as the last `ready` found.
    """

    def __init__(self, host: str, port: int, connect_s: float, devices: Sequence[str]) -> None:
        self._where = (host, port)
        self._master = f"{host}:{port}"
        self._make = load_library(f"mooncake://{self._master}")
        self._connect_s = connect_s
        self._devices = ",".join(devices)
        self._client: Any = None
        self._watch: socket.socket | None = None
        self._memory: list[Part] = []
        self._again_s = 0.0
        self._closed = False
        self.why = ""

    def ready(self, until_s: float, at_once: bool = False) -> Any:
        """Returns the library's client, setting it up if needed, or None; `why` then says what is wrong.

        Args:
            until_s: time on the monotonic clock at which to give up.
            at_once: whether to try even if an attempt has just failed.
        """
        if self._closed:
            raise ClosedError("the store was closed")
        if self._client is not None and self._watch is not None and not _has_ended(self._watch):
            return self._client
        self.doubt()
        now_s = time.monotonic()
        if now_s < self._again_s and not at_once:
            return None
        patience_s = min(self._connect_s, until_s - now_s)
        if patience_s <= 0:
            self.why = "the deadline was over"
            return None
        try:
            self._watch = socket.create_connection(self._where, patience_s)
            self._watch.setblocking(False)
        except OSError as error:
            return self._failed(f"the master {self._master} cannot be reached: {error.strerror or error}")
        if self._client is None:
            # The client's name is the address by which this machine reaches the master; owners distinguish
            # clients by it.
            self._set_up(self._watch.getsockname()[0])
        return self._client

    def _set_up(self, own_address: str) -> None:
        client = self._make()
        protocol = "rdma" if self._devices else "tcp"
        code = client.setup(own_address, "P2PHANDSHAKE", 0, 0, protocol, self._devices, self._master)
        if code != 0:
            self._failed(f"the master {self._master} does not let a client in: code {code}")
            return
        self._client = client
        for memory in self._memory:
            # If this is refused, `register` has already reported it, or transfers fail with a code.
            self._register(memory)

    def _failed(self, why: str) -> None:
        self.doubt()
        self._again_s = time.monotonic() + AGAIN_S
        self.why = why

    def doubt(self) -> None:
        """Records that the master did not answer, so that the next call reconnects to it."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def register(self, memory: Part) -> str:
        """Registers `memory` with the transport, now or as soon as there is a client. Returns why it cannot be used, or
        an empty string.

        Only RDMA needs this. TCP is no faster with it (0.98 to 1.08 of the rate without, 2 MiB values,
        benchmarks/remote_mooncake.py). And the library listens on all interfaces, where it can serve only memory that
        it knows, so less registered memory is safer.
        """
        if not self._devices:
            return ""
        self._memory.append(memory)
        return self._register(memory) if self._client is not None else ""

    def _register(self, memory: Part) -> str:
        code = self._client.register_buffer(memory.ctypes.data, memory.nbytes)
        return "" if code == 0 else f"{memory.nbytes >> 20} MiB could not be registered for RDMA: code {code}"

    def close(self) -> None:
        """Closes the client. Idempotent; takes up to a second if the master is dead."""
        self.doubt()
        if self._client is not None:
            self._client.close()
        self._client = None
        self._closed = True


def _has_ended(watch: socket.socket) -> bool:
    try:
        return watch.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
