"""Imported once by the fork server of all engines, because importing vLLM takes up to ten seconds of CPU."""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
from functools import cache, partial

from demo.engine_child import QUIET_ENVIRONMENT

for _name, _value in QUIET_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# torch compiles some code; it reads CXX at its first import and treats the value as one word.
if " " in os.environ.get("CXX", ""):
    os.environ["CXX"] = os.environ["CXX"].split()[-1]

# After the environment, because some of it is read at import.
import vllm.utils.system_utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    # Replaces vLLM's choice of a start method: on a CPU it always spawns its processes, and each would import
    # everything again. Done before the next import, which binds the function by name.
    assert hasattr(vllm.utils.system_utils, "get_mp_context")
    vllm.utils.system_utils.get_mp_context = partial(multiprocessing.get_context, "fork")

import vllm.entrypoints.llm  # noqa: E402

if current_platform.is_cpu():
    # Modules that an engine imports as it starts; models other than Llama come after the fork. A GPU's worker must not
    # be imported before the fork.
    import vllm.distributed.elastic_ep.elastic_execute
    import vllm.entrypoints.launchers.cli_args
    import vllm.lora.resolver
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.plugins.lora_resolvers.filesystem_resolver
    import vllm.plugins.lora_resolvers.hf_hub_resolver
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.pool.flash_maxsim
    import vllm.v1.worker.cpu_worker
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed

    # The connector is not among them: importing it registers its name with vLLM, which is the plugin's task.
    import flexkv.adapters.vllm.scheduler
    import flexkv.adapters.vllm.worker  # noqa: F401

    # Each of these looks at all modules or loggers, which takes as long as the rest of an engine's start. The kernels
    # stay replaced; an engine with other settings for its log configures it again.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
    configure_logging_if_needed(LoggingConfig())

# flexkv checks once per process, and warns if another package has its name.
importlib.metadata.packages_distributions = cache(importlib.metadata.packages_distributions)
importlib.metadata.packages_distributions()

# An engine collects garbage several times as it starts and ends. Each takes half a second if it looks at the million
# objects of these modules. vLLM thaws them as an engine ends, so that a process can free what it held; these processes
# end with their engine.
gc.collect()
gc.freeze()
gc.unfreeze = lambda: None
