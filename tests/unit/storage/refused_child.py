"""Runs a disk tier in a process for which the kernel refuses a system call, as a container's seccomp filter does.

Program arguments: the folder; the tier's setting `io`; the number of the system call; the errno that the call returns;
and the second argument of the calls to refuse, or -1 to refuse all calls. Prints, as JSON, the disk's state and the
log, or the error with which the tier failed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import re
import struct
import sys
from pathlib import Path

from flexkv import c_ext
from flexkv.errors import FlexKVError
from tests.unit.storage.disk_world import DiskWorld

IO_URING_SETUP, IO_URING_REGISTER = 425, 427
"""Numbers of two system calls; they are the same on every architecture."""
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
"""The kernel's constants PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP and SECCOMP_MODE_FILTER."""
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, SECOND_ARGUMENT = 0, 24
"""Offsets of the system call's number and of its second argument in the data that the kernel passes to a seccomp
filter."""
PLACE = re.compile(r"^\s*\d+: 0x[0-9a-f]+/\d+", re.MULTILINE)


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def refuse(call: int, error: int, second: int) -> None:
    """Makes the system call `call` fail with errno `error` in this process and in every thread that it starts later.

    If `second` is not negative, only calls with this second argument fail.
    """
    lines = [(LOAD, 0, 0, NUMBER), (JUMP_IF_EQUAL, 0, 1 if second < 0 else 3, call)]
    if second >= 0:
        lines += [(LOAD, 0, 0, SECOND_ARGUMENT), (JUMP_IF_EQUAL, 0, 1, second)]
    lines += [(RETURN, 0, 0, ERRNO | error), (RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(lines), code)
    assert libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(SECCOMP, FILTER, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()


def main() -> None:
    folder, io, *numbers = sys.argv[1:]
    call, error, second = map(int, numbers)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flexkv").addHandler(handler)
    if call:
        refuse(call, error, second)
    try:
        world = DiskWorld([Path(folder)], io=io, register_buffers=True)
    except FlexKVError as refusal:
        print(json.dumps({"error": f"{type(refusal).__name__}: {refusal}"}))
        return
    result, generations = world.write(range(8), range(8))
    assert result.reason == ""
    for layerwise in (False, True):
        assert world.read(range(8), range(8), generations, layerwise).reason == ""
    world.wait_durable(range(8), generations)
    assert world.unit._lane is not None
    (_, _, backend, note), *_ = world.unit._lane.states()
    rings = [path.read_text() for path in Path("/proc/self/fdinfo").iterdir() if path.exists()]
    # The kernel's fdinfo has one line per entry of the ring's buffer table. An entry in use shows an address and a
    # length.
    pinned = sum(
        len(PLACE.findall(text.partition("UserBufs:")[2].partition("PollList:")[0])) for text in rings
    )
    assert world.close()
    said = {"backend": backend, "note": note, "logged": logged, "pinned": pinned}
    print(json.dumps({**said, "variant": c_ext.__variant__}))


if __name__ == "__main__":
    main()
