"""The helper's entry point. It makes the process end with its parent, and serves the socket that it inherits."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

from flexkv.remote.helper.control import Control

PR_SET_PDEATHSIG = 1
"""The option of `prctl` that names the signal to send to this process when its parent ends, from linux/prctl.h."""

SWITCH_S = 0.0002
"""The longest time in seconds for which a thread that computes keeps the interpreter lock. It is short so that the
thread for probes soon gets the lock.
"""


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(asctime)s [%(name)s] %(message)s", stream=sys.stderr
    )
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        return  # the parent had ended before `prctl` was called
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignores Ctrl-C: the unit decides when the helper ends
    sys.setswitchinterval(SWITCH_S)
    Control(socket.socket(fileno=descriptor)).serve()
    # Exits without waiting for threads inside library calls, which may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
