"""Runs, in one process of SGLang's environment, the modules that need SGLang's classes but no engine. Prints a line of
JSON per case.

    python -m tests.engines_sglang.parts_child
"""

from __future__ import annotations

import json
import traceback
from importlib import import_module

PARTS = (
    # must be first: its control needs an SGLang without hooks, and the hooks of a linker stay for ever
    "input_child",
    "pool_child",
    "host_pool_child",
    "hash_child",
    "linker_child",
    "events_child",
    "own_flag_child",
    "identity_child",
)
"""Modules with a function `cases()`, which yields the name and the results of each case. They run in one process so
that SGLang is imported only once.
"""


def main() -> None:
    for part in PARTS:
        try:
            for name, found in import_module(f"tests.engines_sglang.{part}").cases():
                print(json.dumps({"part": part, "case": name, **found}), flush=True)
        except Exception:
            # The error is printed as a result, because the tests of the other modules still need their results.
            print(json.dumps({"part": part, "case": "error", "error": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    main()
