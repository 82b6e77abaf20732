"""The socket between a unit and its plugins: its name, who may use it, and one message per line of JSON."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

from flexkv.errors import PluginCallError

PEER = struct.Struct("3i")
"""struct ucred"""

MOST_LINE_BYTES = 16 << 20
"""The longest message: a call with `MOST_TOKENS` tokens."""

MOST_TOKENS = 1 << 20
"""Tokens of one call's prompt."""

MOST_WAIT_S = 600.0
"""The longest that a call may take."""


def socket_name(unit: bytes) -> str:
    """Name of a unit's socket in the abstract namespace of this machine: it leaves no file behind, however the unit's
    process ends. It has the 16 random bytes of the unit's id in it, but no secret is needed: only processes of the
    unit's own user are answered."""
    return f"flexkv-unit-{unit.hex()}"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this process's user, according to the kernel."""
    _, user, _ = PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return bool(user == os.geteuid())


def encoded(message: dict[str, Any]) -> bytes:
    """
    Raises:
        PluginCallError: the message is too long.
    """
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > MOST_LINE_BYTES:
        raise PluginCallError(f"a message of {len(line)} bytes; allowed are {MOST_LINE_BYTES}")
    return line


def decoded(line: bytes) -> dict[str, Any]:
    """
    Raises:
        PluginCallError: the line is not a JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PluginCallError(f"a message that is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise PluginCallError(f"a message that is a {type(message).__name__}; expected an object")
    return message
