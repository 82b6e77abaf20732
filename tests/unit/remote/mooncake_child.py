"""A child process in the network namespace of a Mooncake. It opens a store and calls the store's methods for the test.
The test uses `StoreChild`, and `main` runs in the child.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from flexkv.errors import StoreError
from flexkv.remote.base import Outcome, Store, StoreOptions
from flexkv.remote.mooncake import CLIENT_ENVIRONMENT
from flexkv.remote.stores import open_store
from tests.servers.namespace import Namespace

ROOT = Path(__file__).resolve().parents[3]
GUARD_BYTES = 64
"""Number of guard bytes behind the memory of each part of a value. A get must not overwrite them."""
GUARD = 0xA5
REPLY_S = 60.0


def read_parts(
    store: Store, names: Sequence[str], sizes: Sequence[Sequence[int]], deadline_s: float
) -> tuple[list[Outcome], list[list[bytes]], bool]:
    """Gets values. Returns the outcomes, the bytes of each value's parts, and True if no guard byte behind a part was
    overwritten."""
    memory = [[np.full(size + GUARD_BYTES, GUARD, np.uint8) for size in value] for value in sizes]
    parts = [
        [whole[:size] for whole, size in zip(*both, strict=True)] for both in zip(memory, sizes, strict=True)
    ]
    outcomes = store.get(names, parts, deadline_s)
    guards = [whole[-GUARD_BYTES:] for value in memory for whole in value]
    kept = all(bool((guard == GUARD).all()) for guard in guards)
    return outcomes, [[part.tobytes() for part in value] for value in parts], kept


class Answers:
    """The methods that the test can call in the child, by name."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self._held = np.zeros((0, 0), np.uint8)

    def open(self, options: dict[str, Any]) -> str:
        try:
            self.store = open_store(StoreOptions(**options))
        except StoreError as error:
            return str(error)
        return ""

    def _opened(self) -> Store:
        assert self.store is not None
        return self.store

    def get(self, *arguments: Any) -> Any:
        return read_parts(self._opened(), *arguments)

    def put(self, names: list[str], values: list[list[bytes]], deadline_s: float) -> list[Outcome]:
        parts = [[np.frombuffer(part, np.uint8) for part in value] for value in values]
        return self._opened().put(names, parts, deadline_s)

    def pages(
        self, count: int, page_bytes: int, deadline_s: float
    ) -> tuple[set[Outcome], set[Outcome], bool]:
        """Puts `count` random pages, then gets them. Returns the outcomes of the puts, the outcomes of the gets, and
        whether all bytes came back unchanged."""
        sent = np.random.default_rng(0).integers(0, 256, (count, page_bytes), dtype=np.uint8)
        came = np.zeros_like(sent)
        names = [f"page/{number}" for number in range(count)]
        put = self._opened().put(names, [[page] for page in sent], deadline_s)
        got = self._opened().get(names, [[page] for page in came], deadline_s)
        return set(put), set(got), bool((came == sent).all())

    def get_and_hold(self, names: list[str], page_bytes: int, deadline_s: float) -> list[Outcome]:
        """Gets values into memory that stays allocated, and fills this memory with zeros after the call. `bytes_held`
        then shows whether the library still writes to it after a get that failed.
        """
        self._held = np.zeros((len(names), page_bytes), np.uint8)
        outcomes = self._opened().get(names, [[page] for page in self._held], deadline_s)
        self._held[:] = 0
        return outcomes

    def bytes_held(self) -> int:
        return int(np.count_nonzero(self._held))

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self._opened(), method)(*arguments)

    def last_error(self) -> str:
        return self._opened().last_error


def main() -> None:
    # Mooncake's library may print to stdout. So the child writes its answers to a copy of that descriptor, and
    # redirects stdout to stderr.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers = Answers()
    while True:
        try:
            method, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        began_s = time.monotonic()
        try:
            result: Any = getattr(answers, method)(*arguments)
        except Exception as error:
            result = error
        pickle.dump((result, time.monotonic() - began_s), replies)
        replies.flush()


class StoreChild:
    """Starts a child process and calls its methods.

    Attributes:
        seconds: duration of the last call, in seconds.
    """

    def __init__(
        self, namespace: Namespace, log: BinaryIO, environment: dict[str, str], program: Sequence[str]
    ) -> None:
        self.seconds = 0.0
        self._process = subprocess.Popen(
            namespace.command([sys.executable, *program]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **environment},
            cwd=ROOT,
        )

    def begin(self, method: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the child. Returns the method's result, or raises the method's error."""
        self.begin(method, *arguments)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], REPLY_S)
        assert ready, f"no answer to {method} within {REPLY_S} s"
        result, self.seconds = pickle.load(self._process.stdout)
        if isinstance(result, Exception):
            raise result
        return result

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the child's store, and returns its result."""
        return self.call("ask", method, *arguments)

    def kill_now(self) -> None:
        """Asserts that the child has not answered the last call yet. Then kills the child."""
        assert self._process.poll() is None
        assert self._process.stdout is not None
        assert not select.select([self._process.stdout], [], [], 0)[0], "it has answered already"
        self._process.kill()
        self._process.wait(REPLY_S)

    def kill(self) -> None:
        """Kills the child. Idempotent."""
        self._process.kill()
        self._process.wait(REPLY_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def store_child(
    namespace: Namespace,
    folder: Path,
    url: str = "",
    environment: dict[str, str] = CLIENT_ENVIRONMENT,
    program: Sequence[str] = ("-m", "tests.unit.remote.mooncake_child"),
    **options: Any,
) -> Iterator[StoreChild]:
    """Starts a child. If `url` is given, the child opens the store at this URL. Kills the child at the end."""
    with (folder / "child.log").open("ab") as log:
        child = StoreChild(namespace, log, environment, program)
    try:
        if url:
            assert child.call("open", {"urls": (url,), **options}) == ""
        yield child
    finally:
        child.kill()


if __name__ == "__main__":
    main()
