"""A simulated store that other machines also use, with symbols as values. As with a real store, its answers may be
false.

Questions wait in this store until `StoreMoves` answers them. `StoreMoves` also moves the pages. The real `RemoteTier`
uses this store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexkv.facts.keys import Keys
from flexkv.remote.plane import Presences, RemoteTotals
from flexkv.simulation.base import Key, Symbol, require
from flexkv.storage.tags import tag_fields
from flexkv.transfer.graph import OpId, OpResult, TransferGraph, TransferOp


@dataclass(frozen=True)
class Value:
    """The value under a name.

    Attributes:
        sealed: the key in the value's trailer; None if the trailer is damaged.
        symbols: the value's symbols, one per rank.
    """

    sealed: bytes | None
    symbols: list[Symbol]


@dataclass(frozen=True)
class Question:
    op_id: OpId
    keys: tuple[Keys, ...]
    whole: tuple[bool, ...]


class SymbolicStore:
    """Takes the place of a remote tier's lane and its store. Nothing happens until the simulation calls a method.

    Attributes:
        values: the values by key. A key stands for the name of its value.
        questions: questions that are not answered yet.
        down_reason: why the store cannot be used; empty if it can.
    """

    def __init__(self) -> None:
        self.totals = RemoteTotals()
        self.values: dict[Key, Value] = {}
        self.questions: list[Question] = []
        self.down_reason = ""
        self._held = False
        self._answers: list[tuple[OpId, Presences]] = []

    # --- methods that the remote tier calls, as on its lane ---

    def watch(self) -> None:
        """Does nothing, because the simulation decides when the store is lost or comes back."""

    def submit(self, graph: TransferGraph) -> int | None:
        raise AssertionError("ops are taken from the manager")

    def poll(self) -> list[OpResult]:
        return []

    def close(self, deadline_s: float) -> bool:
        return True

    def hold(self) -> None:
        self._held = True

    def open_for(self, weights: bytes) -> None:
        self._held = False

    def ask(self, op_id: OpId, keys: Sequence[Keys], whole: Sequence[bool]) -> bool:
        require(not self._held, "the store was asked before its values had names")
        if self.down_reason:
            return False
        self.questions.append(Question(op_id, tuple(keys), tuple(whole)))
        return True

    def answers(self) -> list[tuple[OpId, Presences]]:
        answers, self._answers = self._answers, []
        return answers

    def remove(self, group: int, keys: Keys) -> None:
        for row in keys:
            self.values.pop((group, row.tobytes()), None)

    # --- methods that the simulation calls ---

    def answer(self, question: Question, presences: Presences) -> None:
        self.questions.remove(question)
        self._answers.append((question.op_id, presences))

    def lose(self) -> None:
        """Makes the store unreachable. Open questions end without an answer."""
        self.down_reason = "lost"
        for question in list(self.questions):
            self.answer(question, ())


def keys_of(op: TransferOp) -> list[bytes]:
    """Returns the keys of an op's pages, from the op's tags."""
    return [row.tobytes() for row in np.ascontiguousarray(tag_fields(op.tags)["key"])]
