"""The socket between a unit and its plugins: its name, which processes may use it, and its messages, which are lines of
JSON.
"""

from __future__ import annotations

import json
from typing import Any

from flexkv.errors import PluginCallError

MOST_LINE_BYTES = 16 << 20
"""Size of the longest message, enough for a call with `MOST_TOKENS` tokens."""

MOST_TOKENS = 1 << 20
"""The maximum number of tokens in the prompt of a call."""

MOST_WAIT_S = 600.0
"""The longest deadline of a call, in seconds."""


def socket_name(unit: bytes) -> str:
    """Returns the name of a unit's socket. The name is in Linux's abstract socket namespace, so that no file remains,
    however the unit's process ends. The name has the 16 random bytes of the unit's id, but need not be secret, because
    the unit answers only processes of its own user.
    """
    return f"flexkv-unit-{unit.hex()}"


def encoded(message: dict[str, Any]) -> bytes:
    """Returns a message as a line of JSON.

    Raises:
        PluginCallError: the message is too long.
    """
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(line) > MOST_LINE_BYTES:
        raise PluginCallError(f"a message of {len(line)} bytes; allowed are {MOST_LINE_BYTES}")
    return line


def decoded(line: bytes) -> dict[str, Any]:
    """Returns the message in a line of JSON.

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
