"""Runs the parts that need SGLang's classes and no engine, in one process of SGLang's environment. Prints a line of
JSON per case.

    python -m tests.engines_sglang.parts_child
"""

from __future__ import annotations

import json
import traceback
from importlib import import_module

PARTS = (
    "input_child",  # first: its control is a scheduler that nobody watches, and a linker watches it for good
    "pool_child",
    "host_pool_child",
    "hash_child",
    "linker_child",
    "events_child",
    "own_flag_child",
    "identity_child",
)
"""Modules with `cases()`, which yields the name and the results of each case. SGLang is imported once for all of
them."""


def main() -> None:
    for part in PARTS:
        try:
            for name, found in import_module(f"tests.engines_sglang.{part}").cases():
                print(json.dumps({"part": part, "case": name, **found}), flush=True)
        except Exception:
            # The tests of the other parts still need their results.
            print(json.dumps({"part": part, "case": "error", "error": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    main()
