"""Imported once by the fork server of all engines: importing vLLM takes up to ten seconds of CPU."""

from __future__ import annotations

import gc
import multiprocessing
import os
from functools import partial

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

# torch compiles some code; it reads CXX at its first import and takes it for one word.
if " " in os.environ.get("CXX", ""):
    os.environ["CXX"] = os.environ["CXX"].split()[-1]

# After the environment, because some of it is read at import.
import vllm.utils.system_utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    # Replaces vLLM's choice of a start method: on a CPU it always spawns its processes, and each would import all
    # again. Done before the next import, which takes the function by its name.
    assert hasattr(vllm.utils.system_utils, "get_mp_context")
    vllm.utils.system_utils.get_mp_context = partial(multiprocessing.get_context, "fork")

import vllm.entrypoints.llm  # noqa: E402

if current_platform.is_cpu():
    # Modules that an engine imports as it starts; models other than Llama come after the fork. A GPU's worker must not
    # be imported before the fork.
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.lora.resolver
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.cpu_worker

    # Not the connector: it gives vLLM its name as it is imported, which is the plugin's task.
    import flexkv.adapters.vllm.scheduler
    import flexkv.adapters.vllm.worker  # noqa: F401

# An engine collects garbage several times as it starts and ends. Each takes half a second if it looks at the million
# objects of these modules.
gc.collect()
gc.freeze()
