"""Runs Python programs in SGLang's environment, without an engine. The programs print lines of JSON."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from demo.sglang_process import child_environment
from tests.engines_sglang.forked import template

DEADLINE_S = 900.0


def run_child(kind: str, program: str, *arguments: str) -> list[dict[str, Any]]:
    """Runs `python KIND PROGRAM ARGUMENTS` in the root folder of the repository. `kind` is `-m` or `-c`. Returns the
    objects that the program printed, one per line.

    Raises:
        AssertionError: if the program failed; the error contains the end of its output.
    """
    environ = child_environment()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = template().start(
            program, arguments, environ, output.fileno(), errors.fileno(), is_module=kind == "-m"
        )
        code = child.wait(DEADLINE_S)
        output.seek(0)
        errors.seek(0)
        assert code == 0, errors.read().decode(errors="replace")[-4000:]
        return [json.loads(line) for line in output.read().splitlines() if line.startswith(b"{")]
