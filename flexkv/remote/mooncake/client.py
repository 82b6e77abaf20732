"""One client of Mooncake's library. It is set up when the master is alive, and is not called while the master is known
to be unreachable.

The library's calls cannot be interrupted. A call on a client that is not set up, or was closed, ends the process with
SIGSEGV; with a dead master each call takes 4.3 s. So `Client` keeps its own connection to the master, on which it sends
nothing. If that connection has ended, the master has died; checking this costs one system call.
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
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",  # otherwise a stopped owner of memory blocks a call for 30 s per value
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_LANES_PER_PEER": "8",  # with fewer lanes than values, a call waits for a stopped owner several times
}
"""Environment variables of a process that opens a Mooncake store. (An owner of memory is a process whose memory holds
values.) The variables must be set when the process starts, because the library reads them only once. Values that an
operator has set win: `{**CLIENT_ENVIRONMENT, **environment}`.
"""

AGAIN_S = 0.5
"""After a failed attempt to reach the master, calls fail at once for this many seconds, without another attempt."""

ADVICE = "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1; it needs the system's libibverbs1 too"

UNREACHABLE = frozenset({-900, -901})
"""The library's error codes for a master that cannot be reached, and for one that does not answer."""


def load_library(master: str) -> Any:
    """Returns the library's class of clients.

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
    """A client that contributes no memory to the store.

    Args:
        host, port: RPC address of the master.
        connect_s: maximum number of seconds that connecting to the master may take. Setting up the library then takes
            one round trip, or up to MC_RPC_TIMEOUT_MS.
        devices: names of RDMA devices; empty for TCP.

    Attributes:
        why: why `ready` last returned None; empty if it never did.
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
        """Returns the library's client, and sets it up if needed. Returns None if that fails; `why` then says why.

        Args:
            until_s: time on the monotonic clock at which to give up.
            at_once: whether to try even if an attempt has failed less than AGAIN_S ago.
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
            # The client's name is the address from which this machine reaches the master. The processes that hold the
            # values distinguish clients by this name.
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
            # A refusal needs no handling here: `register` has already reported it, or transfers will fail with a code.
            self._register(memory)

    def _failed(self, why: str) -> None:
        self.doubt()
        self._again_s = time.monotonic() + AGAIN_S
        self.why = why

    def doubt(self) -> None:
        """Closes the connection to the master, so that the next call connects again. Call it if the master did not
        answer.
        """
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def register(self, memory: Part) -> str:
        """Registers `memory` with the transport, now or as soon as there is a client. Returns why the memory cannot be
        used; empty if it can, or if it is not registered yet.

        Does nothing for TCP, which is no faster with registered memory. (For values of 2 MiB, the rate with registered
        memory is 0.98 to 1.08 times the rate without it; measured by benchmarks/remote_mooncake.py.) It is also safer
        not to register memory: the library listens on all interfaces, and can serve only memory that is registered.
        """
        if not self._devices:
            return ""
        self._memory.append(memory)
        return self._register(memory) if self._client is not None else ""

    def _register(self, memory: Part) -> str:
        code = self._client.register_buffer(memory.ctypes.data, memory.nbytes)
        return "" if code == 0 else f"{memory.nbytes >> 20} MiB could not be registered for RDMA: code {code}"

    def close(self) -> None:
        """Closes the client. This takes up to a second if the master is dead. Idempotent."""
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
