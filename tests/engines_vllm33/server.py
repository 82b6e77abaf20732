"""Imports vLLM 0.33 on the mocked CUDA once, and forks a process per case, so that the cases need not import it.

    python -m tests.engines_vllm33.server

Orders are lines of JSON on stdin; answers are lines of JSON on stdout.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any


def import_engine() -> None:
    """Imports the modules that an engine imports when it starts."""
    import compressed_tensors  # type: ignore[import-untyped] # noqa: F401
    import vllm.entrypoints.llm
    import vllm.entrypoints.openai.models.protocol
    import vllm.lora.resolver
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.flash_attn
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.worker.gpu.model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    import flexkv.adapters.vllm.scheduler
    import flexkv.adapters.vllm.worker  # noqa: F401
    import tests.engines_vllm33.blending
    import tests.engines_vllm33.sleeping  # noqa: F401

    # The same steps are in demo/engine_preload.py, where comments give their reasons.
    configure_logging_if_needed(LoggingConfig())
    importlib.metadata.packages_distributions = cache(importlib.metadata.packages_distributions)
    importlib.metadata.packages_distributions()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def run_case(order: dict[str, Any]) -> dict[str, Any]:
    from tests.engines_vllm33.cases import CASES

    try:
        return {"value": CASES[order["case"]](**order["arguments"])}
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def run_forked(order: dict[str, Any]) -> dict[str, Any]:
    """Runs the case of the order in a child process. The child's output goes to the log file that the order names."""
    answer = Path(order["log"]).with_suffix(".json")
    child = os.fork()
    if child == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["environment"])
        answer.write_text(json.dumps(run_case(order)))
        sys.stdout.flush()
        # Exits without waiting for the engine's threads. Without a GPU, some of them may wait for ever.
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not answer.exists():
        return {"error": f"its process ended with {os.waitstatus_to_exitcode(status)}"}
    return dict(json.loads(answer.read_text()))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_engine()
    for line in sys.stdin:
        answers.write(json.dumps(run_forked(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
