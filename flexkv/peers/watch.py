"""The thread that shows a unit to its user's other units on this machine, finds those units, and follows their boards
(the memory in which they show their pages).
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexkv.errors import ContractError, FlexKVError
from flexkv.observe import NamedThread, get_logger
from flexkv.peers.card import MOST_CARD_BYTES, UnitCard, decode_card
from flexkv.peers.runtime_folder import (
    read_cards,
    remove_strays,
    remove_unit,
    socket_path,
    write_card,
)
from flexkv.same_user import is_same_user

logger = get_logger(__name__)

FOLLOW_S = 0.02
"""While there are peers, the rings of their boards (the lists of changed slots) are read at intervals of this many
seconds. So lookups find a page at most this long after a peer has it.
"""

SCAN_S = 0.5
"""The number of seconds between two searches of the folder for new units."""

ANSWER_S = 5.0
"""The maximum number of seconds in which a unit must send its card (its description of itself). A unit that did not
answer, or was refused, is asked again after the same number of seconds.
"""

STOP_S = 2.0
"""The maximum number of seconds that `close` waits for the thread. The thread itself waits SCAN_S at most, unless a
peer's disk blocks it.
"""

MOST_CONNECTIONS = 256
"""The maximum number of units that may follow this unit at the same time. Further connections are closed without an
answer.
"""

ASK_STATUS = b"peers?"
"""What `flexkv peers` sends to ask for this unit's status, after it has received the card."""

MOST_FILES = 4
"""The maximum number of file descriptors that are accepted with a card."""


@dataclass(slots=True)
class Asked:
    """A unit that was asked for its card (its description of itself), or has sent it.

    Attributes:
        line: the connection to the unit. When the other end closes it, the unit has ended.
        since_s: when the unit was asked, in seconds of the monotonic clock.
        joined: whether the unit's card has arrived and was accepted.
    """

    line: socket.socket
    since_s: float
    joined: bool = False


class PeerWatch:
    """The thread that shows this unit to its peers, finds the peers, and follows their boards.

    Args:
        folder: the runtime folder.
        files: file descriptors that are sent with the card. Peers may map these files for reading.
        wants: decides from the facts in a unit's file whether to ask the unit for its card.
        join: called with a unit's card and file descriptors, which the watch closes afterwards. Raises FlexKVError to
            refuse the unit.
        left: called with the id of a joined unit that has ended.
        gone: called with a unit's facts when the file in which they were found is gone.
        follow: reads the changes on the peers' boards. Called every FOLLOW_S seconds while there are peers, else every
            SCAN_S.
        status: returns this unit's status for users, as plain values.
    """

    def __init__(
        self,
        folder: Path,
        card: UnitCard,
        files: list[int],
        wants: Callable[[dict[str, Any]], bool],
        join: Callable[[UnitCard, list[int]], None],
        left: Callable[[str], None],
        gone: Callable[[dict[str, Any]], None],
        follow: Callable[[], None],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        self._folder, self._card, self._files = folder, card, files
        self._wants, self._join, self._left, self._gone, self._follow = wants, join, left, gone, follow
        self._status = status
        self._found: dict[str, dict[str, Any]] = {}
        """The facts in the files that the last search found, by the unit's id."""
        self._peers: dict[str, Asked] = {}
        self._again_s: dict[str, float] = {}
        """Maps a unit that ended, did not answer or was refused to the time at which it may be asked again, in seconds
        of the monotonic clock.
        """
        self._served: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        self._scan_at_s = 0.0
        self._thread = NamedThread("flexkv-share", self._run)

    def start(self) -> None:
        """Makes the unit's socket and file in the runtime folder, and starts the thread.

        Raises:
            OSError: the socket or the file cannot be made; call `close` then.
        """
        remove_strays(self._folder)
        path = socket_path(self._folder, self._card.unit)
        self._door.bind(str(path))
        path.chmod(0o600)
        self._door.listen(MOST_CONNECTIONS)
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ, self._answer)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        write_card(self._folder, self._card.unit, self._card.short())
        self._thread.start()

    def close(self) -> None:
        """Ends the thread: other units no longer find this unit, and this unit no longer follows them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.write(self._woken, b"x")
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        with suppress(OSError):
            remove_unit(self._folder, self._card.unit)
        for line in [*self._served, *(peer.line for peer in self._peers.values()), self._door]:
            line.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        while not self._closed:
            joined = any(peer.joined for peer in self._peers.values())
            try:
                for key, _ in self._selector.select(FOLLOW_S if joined else SCAN_S):
                    key.data()
                if self._closed:
                    return
                self._follow()
                if (now_s := time.monotonic()) >= self._scan_at_s:
                    self._scan_at_s = now_s + SCAN_S
                    self._scan(now_s)
            except Exception:  # the unit continues without sharing
                # If a peer's disk has blocked this thread, `close` may have stopped waiting and closed the sockets. An
                # error is expected then.
                if not self._closed:
                    logger.exception("following other units")
                return

    # --- units that follow this one ---

    def _answer(self) -> None:
        """Sends this unit's card to a process that connects, if the process belongs to the same user."""
        try:
            line, _ = self._door.accept()
        except OSError:
            # If this process has no file descriptor left, the connection stays pending. Without a pause, the loop would
            # spin on it.
            time.sleep(FOLLOW_S)
            return
        if len(self._served) >= MOST_CONNECTIONS or not is_same_user(line):
            line.close()
            return
        line.setblocking(False)
        try:
            socket.send_fds(line, [self._card.encode()], self._files)
        except OSError:
            line.close()
            return
        self._served.add(line)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._serve(line))

    def _serve(self, line: socket.socket) -> None:
        """Answers a request for this unit's status. The other end sends nothing else, so this method closes the
        connection on any other input. It also closes the connection if the other end has closed it.
        """
        with suppress(OSError):
            if line.recv(len(ASK_STATUS)) == ASK_STATUS:
                line.send(json.dumps(self._status()).encode())
                return
        self._selector.unregister(line)
        self._served.discard(line)
        line.close()

    # --- units that this one follows ---

    def _scan(self, now_s: float) -> None:
        before, self._found = (
            self._found,
            {unit: facts | {"unit": unit} for unit, facts in read_cards(self._folder)},
        )
        for unit in before.keys() - self._found.keys():
            self._gone(before[unit])
        for unit, facts in self._found.items():
            if unit == self._card.unit or unit in self._peers or now_s < self._again_s.get(unit, 0.0):
                continue
            self._ask(unit, now_s, bool(self._wants(facts)))
        for unit, asked in list(self._peers.items()):
            if not asked.joined and now_s - asked.since_s > ANSWER_S:
                self._end_asked(unit, "it does not answer")
        self._again_s = {unit: at_s for unit, at_s in self._again_s.items() if unit in self._found}

    def _ask(self, unit: str, now_s: float, wanted: bool) -> None:
        """Connects to a unit. If the unit has ended, removes its files. If `wanted`, keeps the connection, on which the
        unit then sends its card.
        """
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        try:
            line.connect(str(socket_path(self._folder, unit)))
        except (ConnectionRefusedError, FileNotFoundError):
            line.close()
            remove_unit(self._folder, unit)
            logger.info("unit %s has ended without leaving; its files are removed", unit)
            return
        except OSError:
            wanted = False
        if not wanted or not is_same_user(line):
            line.close()
            self._again_s[unit] = now_s + ANSWER_S
            return
        self._peers[unit] = Asked(line, now_s)
        self._selector.register(line, selectors.EVENT_READ, lambda: self._read(unit))

    def _read(self, unit: str) -> None:
        """Receives a unit's card and accepts the unit as a peer, or finds that the unit has ended."""
        asked = self._peers[unit]
        text = b""
        files: list[int] = []
        with suppress(OSError):
            text, files, _, _ = socket.recv_fds(asked.line, MOST_CARD_BYTES + 1, MOST_FILES)
        try:
            if not text or asked.joined:
                self._end_asked(unit, "it has ended")
                return
            card = decode_card(text)
            if card.unit != unit:
                raise ContractError(f"its card is that of unit {card.unit}")
            self._join(card, files)
            asked.joined = True
        except (FlexKVError, OSError) as error:
            logger.info("unit %s is not shared with: %s", unit, error)
            self._end_asked(unit, str(error))
        finally:
            for file in files:
                os.close(file)

    def _end_asked(self, unit: str, why: str) -> None:
        asked = self._peers.pop(unit)
        self._selector.unregister(asked.line)
        asked.line.close()
        self._again_s[unit] = time.monotonic() + ANSWER_S
        if asked.joined:
            logger.info("unit %s: %s", unit, why)
            self._left(unit)
