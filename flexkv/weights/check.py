"""Computes a digest of the whole content of an engine's weights. A separate thread does this while the engine runs."""

from __future__ import annotations

import threading
from pathlib import Path

from flexkv.config.sizes import format_size
from flexkv.errors import ConfigError
from flexkv.observe import NamedThread, get_logger
from flexkv.weights.digest import (
    ChangedError,
    DigestError,
    StoppedError,
    check_state,
    digest_files,
    name_of_files,
)
from flexkv.weights.files import FileState, WeightsContent, process_start_ns, weight_files
from flexkv.weights.table import WeightsTable

logger = get_logger(__name__)

SOON_BYTES = 512 << 20
"""`WeightsCheck.start` waits for the digest only if the weights have at most this many bytes. This many bytes can be
read within the time that the call may wait.
"""

TRIES = 2
"""How many times the thread tries to read the files. A try may fail because a network file system has lost its server
for a moment, or because a file's owner, mode or links changed while it was read.
"""

LOCK_WAIT_S = 60.0
LOCK_BYTES_PER_S = 50_000_000
"""While another process on the node reads the same files, this process waits up to LOCK_WAIT_S seconds plus one second
per LOCK_BYTES_PER_S bytes. Then it reads them too.
"""


class WeightsCheck:
    """Computes the digest of an engine's weights in a thread.

    If a file has changed since `since_ns`, there is no digest, because the engine may have loaded the old content.

    Args:
        folder: folder of the node's table of digests (`WeightsTable`); None to use no table.
        since_ns: a time before the engine read any of the files, in Unix nanoseconds; None for the start of the
            process.

    Attributes:
        digest: 32 bytes, equal for equal content and file names; empty until it is known.
        failure: why the digest will never be known; empty if it is known or may still become known.
    """

    def __init__(
        self, content: WeightsContent, folder: Path | None = None, since_ns: int | None = None
    ) -> None:
        self._content = content
        self._table = None if folder is None else WeightsTable(folder)
        self._since_ns = process_start_ns() if since_ns is None else since_ns
        self._first: dict[Path, FileState] = {}
        """Each file's state when the first try began."""
        self._stop = threading.Event()
        self._soon = threading.Event()
        """Set when `start` need not wait any longer: the digest is known, has failed, or will take too long."""
        self.digest = b""
        self.failure = content.unnamed
        self._thread = NamedThread("flexkv-weights", self._run)

    @property
    def pending(self) -> bool:
        """Whether the digest is not known yet but may still become known."""
        return not self.digest and not self.failure

    def start(self, wait_s: float) -> None:
        """Starts the thread, and waits up to `wait_s` seconds for the digest. Stops waiting when the thread finds that
        it has to read more than SOON_BYTES."""
        if self.failure:
            return
        try:
            self._thread.start()
        except RuntimeError as error:  # the system cannot start another thread
            self.failure = f"no thread to read the weights: {error}"
            return
        self._soon.wait(wait_s)

    def stop(self, wait_s: float) -> None:
        """Aborts the reading, and waits up to `wait_s` seconds for the thread to exit. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        for left in reversed(range(TRIES)):
            try:
                self.digest = self._name()
            except (ChangedError, StoppedError) as error:
                self.failure = str(error)
            except (DigestError, ConfigError, OSError) as error:
                if left:
                    logger.warning("%s; it is tried once more", error)
                    continue
                self.failure = str(error)
            except Exception as error:  # not raised, because the engine can run without the digest
                logger.exception("reading the weights")
                self.failure = f"{type(error).__name__}: {error}"
            break
        self._soon.set()

    def _name(self) -> bytes:
        """Computes the digest of all files.

        Raises:
            DigestError, ConfigError, OSError: the digest cannot be computed now.
        """
        parts = [weight_files(Path(path)) for path in self._content.paths]
        files = {file: FileState.of(file) for part in parts for file in part}
        for file, state in files.items():
            first = self._first.setdefault(file, state)
            if first.changed_ns >= self._since_ns or not (state == first or state.is_touched(first)):
                raise ChangedError(
                    f"weights file {file} changed after the engine's start, which may have loaded what was there before"
                )
        digests = self._digests(files)
        for file, state in files.items():
            check_state(file, state, FileState.of(file))
        return name_of_files(parts, digests)

    def _digests(self, files: dict[Path, FileState]) -> dict[Path, str]:
        known = {} if self._table is None else self._table.known(files)
        missing = _without(files, known)
        if not missing:
            return known
        size = sum(state.size for state in missing.values())
        if size > SOON_BYTES:
            self._soon.set()
            logger.info(
                "%s of weights are read once, to name them; until then nothing is served or kept outside host memory",
                format_size(size),
            )
        if self._table is None:
            return known | self._read(missing)
        with self._table.reading(files, LOCK_WAIT_S + size / LOCK_BYTES_PER_S, self._stop):
            # Another process on the node may have read the files while this process waited for the lock.
            known |= self._table.known(missing)
            return known | self._read(_without(files, known))

    def _read(self, files: dict[Path, FileState]) -> dict[Path, str]:
        digests: dict[Path, str] = {}
        entering = threading.Lock()

        def done(path: Path, state: FileState, digest: str) -> None:
            with entering:
                digests[path] = digest
                if self._table is not None:
                    self._table.enter(path, state, digest)

        if files:
            digest_files(files, self._stop, done)
        return digests


def _without(files: dict[Path, FileState], known: dict[Path, str]) -> dict[Path, FileState]:
    return {path: state for path, state in files.items() if path not in known}
