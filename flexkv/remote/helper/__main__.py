"""Starts the process: dies with its parent, and serves the socket that it was given."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

from flexkv.remote.helper.control import Control

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

SWITCH_S = 0.0002
"""A thread that computes keeps the interpreter from the others for so long at most: a question is answered in less."""


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s [%(name)s] %(message)s", stream=sys.stderr
    )
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        return  # it had ended before it could be watched
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the unit says when it is over
    sys.setswitchinterval(SWITCH_S)
    Control(socket.socket(fileno=descriptor)).serve()
    # Threads in calls of a library that may hang do not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
