"""Imports vLLM in the fork server, from which all engines are forked. So the engines need not import it; each import
would take up to ten seconds of CPU time.
"""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
from functools import cache, partial

from demo.engine_child import QUIET_ENVIRONMENT

for _name, _value in QUIET_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# torch compiles some code with the program that CXX names. It reads CXX when it is first imported, and does not split
# it into words.
if " " in os.environ.get("CXX", ""):
    os.environ["CXX"] = os.environ["CXX"].split()[-1]

# Imported after the variables are set, because vLLM reads some of them when it is imported.
import vllm.utils.system_utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if current_platform.is_cpu():
    # Makes vLLM fork its processes: on a CPU it would spawn them, and each would import everything again. The function
    # is replaced before the imports below, because they bind it by name.
    assert hasattr(vllm.utils.system_utils, "get_mp_context")
    vllm.utils.system_utils.get_mp_context = partial(multiprocessing.get_context, "fork")

import vllm.entrypoints.llm  # noqa: E402

if current_platform.is_cpu():
    # These are the modules that an engine imports when it starts. Models other than Llama are imported after
    # the fork. A GPU's worker must not be imported before the fork.
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

    # The connector's own module is not imported, because its import registers the connector's name with vLLM. In an
    # engine, flexkv's plugin for vLLM does that.
    import flexkv.adapters.vllm.scheduler
    import flexkv.adapters.vllm.worker  # noqa: F401

    # Each of the calls below looks at all modules or loggers, which takes as long as the rest of an engine's start. So
    # they are made once, before the fork. The kernel overrides stay in place. An engine with different log settings
    # configures its log again.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
    configure_logging_if_needed(LoggingConfig())

# Each process of flexkv calls packages_distributions() once, to warn if another package is also named flexkv. The call
# takes long, so its result is cached before the fork.
importlib.metadata.packages_distributions = cache(importlib.metadata.packages_distributions)
importlib.metadata.packages_distributions()

# An engine collects garbage several times when it starts and ends, which takes half a second each time if the million
# objects of these modules are included. vLLM calls gc.unfreeze() when an engine ends, so that the process can free
# memory. These processes end with their engine, so gc.unfreeze() is replaced by a function that does nothing.
gc.collect()
gc.freeze()
gc.unfreeze = lambda: None
