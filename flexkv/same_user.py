"""Whether the process at the other end of a Unix socket belongs to the same user.

Other users can connect to sockets in Linux's abstract namespace, and to a socket's path if its folder lets them in.
"""

from __future__ import annotations

import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process, user and group."""


def is_same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to this process's user, according to the kernel."""
    _, user, _ = CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )
    return bool(user == os.geteuid())
