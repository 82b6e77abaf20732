"""Runs a job in a separate process if the store's client library reads its settings from the environment when it is
loaded. Calls of such a library cannot be interrupted, but the process can be killed. Jobs for other stores run in this
process.

The process is `flexkv.cli.remote.child FD`. It reads the job from its standard input and writes the result to file
descriptor FD.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from typing import Any

from flexkv.cli.remote.jobs import JOBS
from flexkv.errors import FlexKVError, StoreError
from flexkv.remote.base import StoreOptions
from flexkv.remote.own_program import own_program
from flexkv.remote.settings import client_environment

GRACE_S = 5.0
"""The child process ends itself at its deadline. The parent process waits this many seconds longer."""


def run_job(options: StoreOptions, job: str, *arguments: object, most_s: float) -> Any:
    """Returns the result of `JOBS[job](options, *arguments)`.

    Args:
        most_s: seconds after which a separate process ends itself. It does not limit a job in this process.

    Raises:
        StoreError: the job raised an error, or its process died or did not end in time.
    """
    environment = client_environment(options)
    if not environment:
        return JOBS[job](options, *arguments)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answer, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*own_program("flexkv.cli.remote.child"), str(writer)],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            pass_fds=[writer],
            env={**environment, **os.environ},
        )
        os.close(writer)
        try:
            process.communicate(pickle.dumps((options, job, arguments, most_s)), most_s + GRACE_S)
        except subprocess.TimeoutExpired:
            raise StoreError(f"the store's library did not come back within {most_s:.0f} s") from None
        finally:
            process.kill()
            process.wait()
        result = answer.read()
        if process.returncode != 0 or not result:
            said.seek(0)
            raise StoreError(_how(process.returncode, said.read(), most_s))
    fault, value = pickle.loads(result)
    if fault:
        raise StoreError(fault)
    return value


def _how(code: int, said: bytes, most_s: float) -> str:
    if code == -signal.SIGALRM:
        return f"the store's library did not come back within {most_s:.0f} s"
    lines = said.decode(errors="replace").strip().splitlines()
    how = f"by signal {-code}" if code < 0 else f"with {code}"
    return f"the process with the store's library ended {how}: {lines[-1] if lines else 'it said nothing'}"


def main() -> None:
    options, job, arguments, most_s = pickle.load(sys.stdin.buffer)
    signal.alarm(max(1, round(most_s)))  # ends the process even if its parent has died
    fault, value = "", None
    try:
        value = JOBS[job](options, *arguments)
    except FlexKVError as error:
        fault = str(error)
    with os.fdopen(int(sys.argv[1]), "wb") as answer:
        pickle.dump((fault, value), answer)


if __name__ == "__main__":
    main()
