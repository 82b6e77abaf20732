"""What SGLang's own connector to the other package named flexkv meets in this one."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from importlib import import_module
from typing import Any

CONNECTOR = "sglang.srt.mem_cache.storage.flexkv.flexkv_connector"
"""What `--enable-flexkv` imports in the scheduler's process."""


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import_module(CONNECTOR)
        yield "import", {"error": ""}
    except Exception as error:
        yield "import", {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
