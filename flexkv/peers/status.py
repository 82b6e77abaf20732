"""Asks the units in a runtime folder what they have of each other."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from flexkv.peers.card import MOST_CARD_BYTES
from flexkv.peers.runtime_folder import is_same_user, read_cards, socket_path
from flexkv.peers.watch import ASK_STATUS, MOST_FILES

MOST_STATUS_BYTES = 128 << 10


def ask_units(folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """What each unit says; for one that does not answer within `deadline_s` seconds its file, and `error`."""
    return [_ask(folder, unit, facts, deadline_s) for unit, facts in read_cards(folder)]


def _ask(folder: Path, unit: str, facts: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    silent = {"unit": unit, "peers": [], "refused": {}} | facts
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(deadline_s)
        try:
            line.connect(str(socket_path(folder, unit)))
            if not is_same_user(line):
                return silent | {"error": "another user's"}
            _, files, _, _ = socket.recv_fds(line, MOST_CARD_BYTES, MOST_FILES)
            for file in files:
                os.close(file)
            line.send(ASK_STATUS)
            told = json.loads(line.recv(MOST_STATUS_BYTES))
        except (ConnectionRefusedError, FileNotFoundError):
            return silent | {"error": "has ended"}
        except (OSError, ValueError) as error:
            return silent | {"error": f"does not answer: {error}"}
    return silent | told if isinstance(told, dict) else silent | {"error": "does not answer"}
