"""Runs, in one process of SGLang's environment, what needs its classes and no engine. Prints a line of JSON a case.

python -m tests.engines_sglang.parts_child
"""

from __future__ import annotations

import json
import traceback
from importlib import import_module

PARTS = (
    "pool_child",
    "host_pool_child",
    "hash_child",
    "linker_child",
    "own_flag_child",
    "identity_child",
    "input_child",
)
"""Modules with `cases()`, which yields a name and what was found. SGLang is imported once for all of them."""


def main() -> None:
    for part in PARTS:
        try:
            for name, found in import_module(f"tests.engines_sglang.{part}").cases():
                print(json.dumps({"part": part, "case": name, **found}), flush=True)
        except Exception:
            # The tests of the other parts are still of use.
            print(json.dumps({"part": part, "case": "error", "error": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    main()
