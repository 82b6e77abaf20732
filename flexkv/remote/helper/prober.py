"""Asks the store which pages it has. The prober has its own client, so that probes do not wait behind gets and puts."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from flexkv.facts.keys import KEY_BYTES, Keys
from flexkv.remote.base import ALIVE_S, Presence
from flexkv.remote.helper.movers import Work, why_lost
from flexkv.remote.messages import Alive, Answer, Probe

CHUNK = 256
"""The maximum number of names per call; a store answers this many names in 0.2 ms. For a KV group in which all pages
after a missing page are useless, the first call that finds a name missing is the last call.
"""

ANSWER_SHARE = 0.8
"""The unit waits `probe_s` seconds for a probe. The helper stops asking after this fraction of that time. So the
answers of some servers reach the unit in time even if other servers do not answer.
"""

NO_KEYS: Keys = np.empty((0, KEY_BYTES), np.uint8)


class HelperProber:
    """Carries out `Probe` and `Alive` messages."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._store = work.open()

    def carry_out(self, message: Probe | Alive) -> None:
        if message.number <= self._work.cancelled:
            self._work.tell(Answer(message.number))
        elif isinstance(message, Alive):
            self._work.tell(Answer(message.number, lost=self._store.alive(ALIVE_S)))
        else:
            self._work.tell(self._answer(message))

    def _answer(self, message: Probe) -> Answer:
        ends_s = time.monotonic() + ANSWER_SHARE * self._work.setup.probe_s
        reached = True
        # The prober first asks about groups in which all pages after a missing page are useless: if the first page of
        # such a group is missing, no page of any group is useful.
        order = sorted(range(len(message.keys)), key=lambda group: not message.whole[group])
        answers: dict[int, NDArray[np.uint8]] = {}
        for group in order:
            asked = message.keys_of(group) if reached else NO_KEYS
            answers[group] = self._ask(group, asked, message.whole[group], ends_s)
            if message.whole[group] and len(asked):
                reached &= bool(len(answers[group])) and answers[group][0] == Presence.YES
        presence = [answers[group] for group in range(len(message.keys))]
        unknown = any((of_group == Presence.UNKNOWN).any() for of_group in presence)
        found = tuple(of_group.tobytes() for of_group in presence)
        return Answer(message.number, found, why_lost(self._store) if unknown else "")

    def _ask(self, group: int, keys: Keys, whole: bool, ends_s: float) -> NDArray[np.uint8]:
        """Returns the `Presence` of as many leading keys as there was time to ask about. If `whole` is set, stops after
        the first call that finds a page missing.
        """
        form, found = self._work.formats[group], [np.empty(0, np.uint8)]
        for first in range(0, len(keys), CHUNK):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                break
            names = form.names(keys[first : first + CHUNK])
            answers = np.array(self._store.exists(names, left_s), np.uint8)
            found.append(answers)
            if whole and (answers != Presence.YES).any():
                break
        return np.concatenate(found)
