"""Runs cases of the fuzzer in a separate process.

`python -m tests.unit.native_border.fuzz_child MODULE SEED FIRST END FOLDER LOG CASE_S AT_ONCE [CALLS]`

Before each call this process writes it to LOG, so that the parent knows the last call if this process dies. Exit code
0: all calls ended as allowed. 3: a call ended in a way that is not allowed, and the last line of the output describes
it. 1: a case took longer than CASE_S. If SEED is `valid`, each call is made once with valid arguments.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import resource
import sys
from pathlib import Path

from tests.unit.native_border.arguments import NO_CONSTRUCTOR
from tests.unit.native_border.cases import Fuzzer, Wrong
from tests.unit.native_border.recipes import NOT_MADE

WRONG = 3
MEMORY_BYTES = 1 << 30
"""Bytes of memory that the process may use beyond what it uses at its start. There is no limit under a sanitizer,
because AddressSanitizer maps terabytes.
"""

SWITCH_S = 1e-5
"""Python's switch interval, in seconds. It is short, so that concurrent calls overlap in the core."""

FILE_BYTES = 64 << 20
GC_CASES = 50


def limit(sanitizer: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not sanitizer:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def main() -> None:
    name, seed, first, end, folder, log, case_s, at_once, *calls = sys.argv[1:]
    faulthandler.enable()
    module = importlib.import_module(name)
    told = open(log, "w", buffering=1, encoding="ascii", errors="backslashreplace")  # noqa: SIM115
    os.chdir(folder)  # so that files with hostile relative paths are made in `folder`

    def say(line: str) -> None:
        told.write(line + "\n")

    info: dict[str, object] = getattr(module, "build_info", dict)()
    limit(str(info.get("sanitizer", "")))
    sys.setswitchinterval(SWITCH_S)
    fuzzer = Fuzzer(module, 0 if seed == "valid" else int(seed), Path(folder), say, float(at_once))
    try:
        if seed == "valid":
            run_valid(fuzzer)
        for case in range(int(first), int(end)):
            faulthandler.dump_traceback_later(float(case_s), exit=True)
            fuzzer.run(case, [int(call) for call in calls] or None)
            if case % GC_CASES == 0:
                gc.collect()
    except Wrong as error:
        print(error)
        sys.stdout.flush()
        os._exit(WRONG)
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    print(json.dumps({"returned": fuzzer.returned, "raised": fuzzer.raised}))


def run_valid(fuzzer: Fuzzer) -> None:
    wrong = []
    for target in fuzzer.targets:
        if target.owner not in NOT_MADE and target.name not in NO_CONSTRUCTOR:
            try:
                fuzzer.run_valid(target)
            except Exception as error:
                wrong.append(f"{target.name}: {type(error).__name__}: {error}")
    if wrong:
        raise Wrong("\n".join(wrong))


if __name__ == "__main__":
    main()
