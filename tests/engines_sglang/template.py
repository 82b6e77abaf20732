"""Imports SGLang once, and forks the processes that tests need. This saves half a minute of CPU time per process.

    python -m tests.engines_sglang.template SOCKET

An order on the socket is a JSON message with file descriptors; the answer to it is a process id. The program ends when
the other end of the socket is closed.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

ORDER_BYTES = 1 << 18
"""Largest size of an order in bytes."""
OUTPUT, ERRORS, ENDED = range(3)
"""Positions of file descriptors in an order: the process's standard output, its standard error, and the pipe to which
it writes its exit code. The numbers of the descriptors after these are the program's first arguments.
"""


def import_engine() -> None:
    """Imports the modules that an engine imports when it starts."""
    import sglang
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.llama
    import sglang.srt.models.registry  # noqa: F401

    gc.collect()
    gc.freeze()


def become(order: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Runs the program of an order in this process, as `python -m MODULE` or `python -c PROGRAM` would do. Returns the
    program's exit code.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(descriptors[OUTPUT], 1)
    os.dup2(descriptors[ERRORS], 2)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [order["program"], *map(str, descriptors[ENDED + 1 :]), *order["arguments"]]
    try:
        if order["is_module"]:
            runpy.run_module(order["program"], run_name="__main__", alter_sys=True)
        else:
            exec(compile(order["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    # needed because this process does not wait for its children, which would remain as zombies
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    import_engine()
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, ORDER_BYTES, 8)
        if not message:
            return
        child = os.fork()
        if child == 0:
            asked.close()
            code = become(json.loads(message), descriptors)
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(descriptors[ENDED], str(code).encode())
            os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(child).encode())


if __name__ == "__main__":
    main()
