"""Runs the Python tests of the native core with an extension that is built with a sanitizer.

`python -m tests.sanitizers.run SANITIZER [--short]`
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

from build_support.ninja_file import ROOT, Variant
from build_support.variant_package import make_tree, sanitizer_environment
from tests.soak import SOAK_VARIABLE

FOLDERS = {
    "address": (
        "tests/unit/layout",
        "tests/unit/cache/test_keys.py",
        "tests/unit/cache/test_host_loads.py",
        "tests/unit/cache/test_host_stores.py",
        "tests/unit/cache/test_lookup.py",
        "tests/unit/cache/test_manager.py",
        "tests/unit/transfer",
        "tests/unit/storage",
        "tests/unit/gds/test_gds_matrix.py",
        "tests/unit/native_border",
        "tests/unit/blend/test_rotation.py",
    ),
    "thread": (
        "tests/unit/layout",
        "tests/unit/transfer",
        "tests/unit/storage",
        "tests/unit/gds/test_gds_matrix.py",
        "tests/unit/native_border/test_fuzz_threads.py",
    ),
}
"""The tests of the native core to run with each sanitizer. These tests use neither torch nor inference engines, because
those are not built with a sanitizer.
"""

SHORT = ("tests/unit/native_border", "tests/unit/transfer/test_engine_submit.py")
"""The tests for `--short`, which `make test` runs with `address`. They call every binding with wrong and with random
arguments. The C++ tests, which always run with both sanitizers, cover the code behind the bindings.
"""


def main() -> None:
    parser = ArgumentParser(description="Runs Python tests of the native core on one built with a sanitizer.")
    parser.add_argument("sanitizer", choices=FOLDERS)
    parser.add_argument(
        "--short", action="store_true", help="those of `make test`; all of them in `make soak`"
    )
    asked = parser.parse_args()
    sanitizer, paths = asked.sanitizer, SHORT if asked.short else FOLDERS[asked.sanitizer]
    tree = make_tree(Variant(None, sanitizer))
    # With a sanitizer, random cases take 5 to 20 times as long. So a soak run makes only as many as `make test`.
    environ = sanitizer_environment(sanitizer) | {SOAK_VARIABLE: "1"}
    which = "import flexkv.c_ext as c; print(c.__variant__, c.__file__)"
    told = subprocess.run(
        [sys.executable, "-c", which], stdout=subprocess.PIPE, text=True, cwd=tree, env=environ
    )
    assert told.returncode == 0
    variant, path = told.stdout.split()
    assert variant == f"cpu-{sanitizer}"
    assert Path(path).is_relative_to(tree)

    assert all((ROOT / path).exists() for path in paths)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths]
    raise SystemExit(subprocess.run(command, cwd=tree, env=environ).returncode)


if __name__ == "__main__":
    main()
