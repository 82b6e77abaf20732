"""Lists the hooks that vLLM 0.32 and 0.33 call on a connector, with the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

Parameters = tuple[str, ...]

COMMON: dict[str, Parameters] = {
    # Hooks that vLLM calls on the worker's connector.
    "get_mem_pool_context": (),
    "register_kv_caches": ("kv_caches",),
    "set_host_xfer_buffer_ops": ("copy_operation",),
    "bind_connector_metadata": ("connector_metadata",),
    "has_connector_metadata": (),
    "clear_connector_metadata": (),
    "handle_preemptions": ("kv_connector_metadata",),
    "start_load_kv": ("forward_context", "**kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "**kwargs"),
    "finish_forward": (),
    "reset_capture_state": (),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_transfer_results": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "get_kv_connector_kv_cache_events": (),
    "build_connector_worker_meta": (),
    "get_handshake_metadata": (),
    # Hooks that vLLM calls on the scheduler's connector.
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "set_xfer_handshake_metadata": ("metadata",),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "get_loaded_kv_cache_group_ids": ("request",),
    "get_external_cache_hit_sources": ("request", "num_external_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "register_finished_partial_tail": ("request", "block_ids", "partial_tail_offloads"),
    "take_events": (),
    "has_pending_block_frees": (),
    "has_pending_push_work": (),
    "get_finished_count": (),
    "reset_cache": (),
    # Hooks that vLLM calls on the worker's and on the scheduler's connector.
    "get_kv_connector_stats": (),
    "shutdown": (),
    # Hooks that vLLM calls on the connector's class.
    "get_required_kvcache_layout": ("vllm_config",),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
}

ADDED_IN_0_33: dict[str, Parameters] = {
    "supports_sleep_mode": ("kv_transfer_config",),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
}

INTERFACES = {(0, 32): COMMON, (0, 33): COMMON | ADDED_IN_0_33}

ABSTRACT = (
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
)
PROPERTIES = ("supports_divergent_local_hybrid_hits", "requires_kv_delivery", "role")


def parameters_of(hook: object) -> Parameters:
    """Returns the names of a method's parameters without `self`. A parameter that takes any keyword is written
    `**name`.
    """
    found = inspect.signature(hook).parameters.values()  # type: ignore[arg-type]
    named = [p for p in found if p.name != "self"]
    return tuple(f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in named)


def public_hooks(connector: type) -> dict[str, Parameters]:
    """Returns every public method of a class, with the names of its parameters."""
    members = {name: inspect.getattr_static(connector, name) for name in dir(connector)}
    return {
        name: parameters_of(getattr(connector, name))
        for name, member in members.items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod))
    }


def misfits(connector: type, hooks: Mapping[str, Parameters]) -> list[str]:
    """Returns one line for each hook that the class lacks, or that vLLM cannot call with its positions and names of
    arguments.
    """
    found = []
    for name, parameters in hooks.items():
        hook = inspect.getattr_static(connector, name, None)
        method = getattr(connector, name, None)
        if hook is None or method is None:
            found.append(f"{name}: missing")
            continue
        me = () if isinstance(hook, classmethod) else (None,)
        named = [parameter for parameter in parameters if not parameter.startswith("**")]
        more = {"any": None} if len(named) < len(parameters) else {}
        signature = inspect.signature(method)
        try:
            signature.bind(*me, *(None for _ in named), **more)
            signature.bind(*me, **dict.fromkeys(named), **more)
        except TypeError as error:
            found.append(f"{name}: {error}")
    return found
