"""Mounts one folder several times through OpenSSH's SFTP server: a network file system without a network.

Each mount has its own client and server process, connected by a pipe. The mounts behave like mounts on different
machines: sshfs caches names and attributes for some time, a mount is not notified when another mount writes, and memory
mappings are not coherent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from build_support import preflight
from demo.engine_child import die_with_parent

DEVICE = Path("/dev/fuse")
START_DEADLINE_S = 20.0
END_DEADLINE_S = 10.0


class NoMounts(Exception):
    """Raised if this user cannot mount with sshfs on this machine. The message gives the reason."""


class SftpMount:
    """A mount of a folder through SFTP.

    Attributes:
        path: the mount point.
        client: process id of sshfs.
        server: process id of the SFTP server.
    """

    def __init__(self, export: Path, path: Path, options: str) -> None:
        if (lacking := preflight.no_sftp()) is not None:
            raise NoMounts(lacking)
        if not os.access(DEVICE, os.R_OK | os.W_OK):
            raise NoMounts(f"{DEVICE} cannot be opened")
        path.mkdir()
        self.path = path
        told = path.with_name(f"{path.name}.server")
        started = path.with_name(f"{path.name}.ssh")
        # sshfs runs this script instead of ssh, and talks to the SFTP server over the script's standard input and
        # output.
        started.write_text(
            f"#!/bin/sh\necho $$ > {told}.new && mv {told}.new {told}\nexec {preflight.sftp_server()}\n"
        )
        started.chmod(0o700)
        self._log = path.with_name(f"{path.name}.log")
        with self._log.open("wb") as out:
            self._client = subprocess.Popen(
                ["sshfs", "-f", "-o", f"ssh_command={started},{options}", f"none:{export}", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # If the test is killed, the kernel sends SIGTERM to sshfs, which ends the mount.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        self.client = self._client.pid
        ends_s = time.monotonic() + START_DEADLINE_S
        while not (path.is_mount() and told.exists()):
            if self._client.poll() is not None or time.monotonic() > ends_s:
                self.close()
                raise NoMounts(self._log.read_text().strip() or "sshfs does not start")
            time.sleep(0.02)
        self.server = int(told.read_text())

    def signal_server(self, number: signal.Signals) -> None:
        os.kill(self.server, number)

    def close(self) -> None:
        """Ends the mount. Calls that wait for the mount fail. Idempotent."""
        subprocess.run(["umount", "-l", str(self.path)], stderr=subprocess.DEVNULL, timeout=END_DEADLINE_S)
        if self._client.poll() is None:
            self._client.kill()
            self._client.wait(END_DEADLINE_S)
        # in this case, the server has not started, or has ended already
        with suppress(AttributeError, ProcessLookupError):
            os.kill(self.server, signal.SIGKILL)
