"""Which engine uses which setting. When an engine starts, flexkv logs each given setting that this engine does not use,
because the user would otherwise assume that the setting works.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexkv.config.model import DEFAULT_ORIGIN, FlexKVConfig
from flexkv.config.names import shown

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}

STEP_LOADS_NEED = (
    "vLLM loads within the step only with --no-async-scheduling and, where it runs Model Runner V2 (its default on "
    "GPUs) with kv_load_failure_policy recompute, VLLM_USE_V2_MODEL_RUNNER=0; else its loads are async"
)


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Why an engine does not use a setting.

    Attributes:
        because: the reason, for the log and the documentation.
        acts_as: the value of the setting that matches the engine's fixed behaviour; None if there is no such value. If
            the user gives this value, nothing is logged.
        named_by_tier: whether the tier that would use the setting logs a warning itself, so that none is logged here.
    """

    because: str
    acts_as: object = None
    named_by_tier: bool = False


_ONE_WAY_OF_STORES = NoEffect("a page is stored once the engine offers it", "eager")
_AS_OFFERED = NoEffect("a page is stored once the engine offers it")
_WHOLE_PAGES = NoEffect("the engine offers whole pages only", False)
_NO_LOST_BLOCKS = NoEffect("the engine keeps a page until its store has ended")
_ONE_GROUP = NoEffect("only engines with one KV group are served")
_NO_STEP_TIMES = NoEffect(
    "the engine's steps are not timed, so what is on disk is always read before it is computed", False
)
_NO_RECOMPUTE = NoEffect("the engine cannot compute what a load did not bring", False, named_by_tier=True)
_FOR_TENSORRT = NoEffect("hooks of layers are TensorRT-LLM's", "auto")
_MANY_PIECES = NoEffect(
    "a block lies in several pieces of its pool, so that it passes through staging", "off"
)
_FOR_VLLM = NoEffect("blending inside an engine is vLLM's; beside the others it is a library (flexkv.blend)")

PARTLY: dict[str, dict[str, NoEffect]] = {
    "store.mode": {"sglang": _ONE_WAY_OF_STORES, "tensorrt_llm": _ONE_WAY_OF_STORES},
    "store.tokens": {"sglang": NoEffect("SGLang offers a node of its tree whoever made its tokens", "all")},
    "store.generated_blocks": {"sglang": _AS_OFFERED, "tensorrt_llm": _AS_OFFERED},
    "store.partial_blocks": {"sglang": _WHOLE_PAGES, "tensorrt_llm": _WHOLE_PAGES},
    "store.max_reference_share": {"sglang": _NO_LOST_BLOCKS, "tensorrt_llm": _NO_LOST_BLOCKS},
    "store.hold_s": {"sglang": _NO_LOST_BLOCKS, "tensorrt_llm": _NO_LOST_BLOCKS},
    "store.checkpoint_tokens": {"sglang": _ONE_GROUP, "tensorrt_llm": _ONE_GROUP},
    "load.mode": {
        "sglang": NoEffect(
            "a load always starts with its forward, and each layer waits for its own pages", "layerwise"
        )
    },
    "load.layer_hooks": {"vllm": _FOR_TENSORRT, "sglang": _FOR_TENSORRT},
    "load.lookup_wait_s": {
        "vllm": NoEffect("vLLM asks again while pages are read; disk.wait_s and remote.wait_s bound that")
    },
    "load.prefetch_layers": {"sglang": _FOR_VLLM, "tensorrt_llm": _FOR_VLLM},
    "disk.prefetch_requests": {
        "tensorrt_llm": NoEffect("TensorRT-LLM does not say when a request enters its queue", 0)
    },
    "disk.compute_if_faster": {"sglang": _NO_STEP_TIMES, "tensorrt_llm": _NO_STEP_TIMES},
    "disk.stream": {"sglang": _NO_RECOMPUTE, "tensorrt_llm": _NO_RECOMPUTE},
    **{
        f"blend.{name}": {"sglang": _FOR_VLLM, "tensorrt_llm": _FOR_VLLM}
        for name in (
            "enabled",
            "separators",
            "ratio",
            "min_tokens",
            "check_layer",
            "run_tokens",
            "bytes",
            "disk_bytes",
        )
    },
    "gds.register_pool": {"vllm": _MANY_PIECES, "sglang": _MANY_PIECES},
    "observe.metrics_log_s": {"vllm": NoEffect("vLLM logs with its own statistics what was counted")},
}
"""For each setting and each engine that does not use it, the reason."""

EVERYWHERE = frozenset(
    [
        "host.bytes",
        "host.bytes_per_rank",
        "host.memory_share",
        "host.units_per_node",
        "host.extent_bytes",
        "host.huge_pages",
        "host.numa_node",
        "host.verify",
        "host.verify_threads",
        "store.inflight_pages",
        "load.deadline_s",
        "load.lease_s",
        "load.inflight_pages",
        "transfer.queue_ops",
        "transfer.copy_threads",
        "transfer.batch_copies",
        "transfer.copy_kernel",
        "transfer.ways_file",
        "transfer.stuck_s",
        "transfer.close_s",
        "disk.folders",
        "disk.bytes_per_folder",
        "disk.space_share",
        "disk.mode",
        "disk.ttl_s",
        "disk.wait_s",
        "disk.gds",
        "disk.gds_may_fail_requests",
        "disk.gds_stores",
        "disk.write_pages",
        "disk.io",
        "disk.depth",
        "disk.register_buffers",
        "disk.stuck_s",
        "remote.urls",
        "remote.user",
        "remote.password_file",
        "remote.ca_file",
        "remote.trusted_network",
        "remote.tenant",
        "remote.write",
        "remote.wait_s",
        "remote.probe_s",
        "remote.get_s",
        "remote.stuck_s",
        "remote.batch_pages",
        "remote.inflight_pages",
        "remote.put_bytes_per_s",
        "remote.ttl_s",
        "remote.rdma_devices",
        "gds.use_staged_transfer",
        "gds.max_staging_blocks",
        "gds.max_staging_bytes",
        "gds.threads_per_disk",
        "index.policy",
        "keys.scheme",
        "identity.model",
        "identity.namespace",
        "plugins.folder",
        "peers.share",
        "peers.store",
        "peers.folder",
        "peers.across_machines",
        "peers.beat_s",
        "observe.log_level",
        "observe.nvtx",
    ]
)
"""Settings that every engine uses."""


def without_effect(config: FlexKVConfig, engine: str) -> list[str]:
    """Returns one sentence for each setting that the user gave and that the engine does not use.

    Args:
        engine: a key of `ENGINES`.
    """
    found = []
    for key, engines in PARTLY.items():
        origin = config.origin(key)
        if engine not in engines or origin == DEFAULT_ORIGIN:
            continue
        section, name = key.split(".")
        value, why = getattr(getattr(config, section), name), engines[engine]
        if not why.named_by_tier and (why.acts_as is None or value != why.acts_as):
            found.append(f"{key}={shown(value)} ({origin}) has no effect in {ENGINES[engine]}: {why.because}")
    return found


def markdown_engines() -> str:
    """Returns the Markdown table of the settings that not every engine uses."""
    lines = [f"| setting | {' | '.join(ENGINES.values())} |", "|---" * (1 + len(ENGINES)) + "|"]
    for key, engines in PARTLY.items():
        cells = [f"no effect: {engines[name].because}" if name in engines else "works" for name in ENGINES]
        lines.append(f"| `{key}` | {' | '.join(cells)} |")
    return "\n".join(lines)
