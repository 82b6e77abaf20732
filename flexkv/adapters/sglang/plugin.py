"""SGLang's plugin entry point (group `sglang.srt.plugins`): makes flexkv the dynamic linker if the user configured no
linker.

SGLang calls `activate` in each of its processes before it resolves its arguments. If flexkv is installed, the arguments
`--enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic` are enough to select flexkv.
flexkv's settings then come only from FLEXKV_CONFIG and FLEXKV_*.
"""

from __future__ import annotations

from typing import Any

LINKER = {"linker": "FlexKVLinker", "linker_module_path": "flexkv.adapters.sglang"}
"""The value for `--unified-cache-external-linker-config` that selects flexkv."""

TARGET = "sglang.srt.arg_groups.hicache_hook.handle_hicache"
"""SGLang's function that resolves and checks the linker's arguments."""


def activate() -> None:
    """Registers the hook that calls `name_linker`. If this fails, SGLang logs the error and goes on without the
    hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, name_linker, HookType.BEFORE)


def name_linker(server_args: Any) -> None:
    """Makes flexkv the linker if the user chose the dynamic backend and configured no linker."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    asked = resolving_view(server_args)
    if (
        asked.enable_unified_cache_external_linker
        and asked.unified_cache_external_linker_backend == "dynamic"
        and asked.unified_cache_external_linker_config is None
    ):
        declare_resolution(server_args, "flexkv", unified_cache_external_linker_config=dict(LINKER))
