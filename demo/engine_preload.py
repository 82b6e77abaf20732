"""Imported once by the fork server of all engines: importing vLLM takes up to ten seconds of CPU."""

from __future__ import annotations

import os

QUIET_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Workers are forked from a process that has imported everything; a spawned one would import it all again.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""No network, no telemetry, 1 GiB of KV cache at most."""

for _name, _value in QUIET_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# torch compiles here and there, reads CXX with its first import, and takes it for one word.
if " " in os.environ.get("CXX", ""):
    os.environ["CXX"] = os.environ["CXX"].split()[-1]

import vllm.entrypoints.llm  # noqa: E402, F401 (after the environment, some of it is read at import)
