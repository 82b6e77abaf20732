"""Settings of an engine's weight loader that decide which files it reads; settings that only affect speed are left
out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from flexkv.adapters.common.model_identity import plain_config

USUAL = "safetensors"
SAME_FILES = frozenset(
    {"auto", "hf", USUAL, "fastsafetensors", "instanttensor", "runai_streamer", "local_cached"}
)
"""Formats with which loaders read the same files of a model that has `*.safetensors`. For a model without such files,
a loader of these formats falls back to other files or refuses to start."""

SPEED_ENTRIES = frozenset(
    {
        "concurrency",
        "distributed",
        "enable_gds",
        "enable_multithread_load",
        "enable_weights_track",
        "hash_num_threads",
        "max_file_bytes",
        "memory_limit",
        "num_threads",
        "verify_on_load",
    }
)
"""Entries of `model_loader_extra_config` that decide how files are read or checked, not which."""

FORMAT_RULE = f"by the files that are read: {', '.join(sorted(SAME_FILES))} count as one, others by name"
EXTRA_RULE = f"without {', '.join(sorted(SPEED_ENTRIES))}"


def files_of_format(load_format: Any) -> str:
    """A name for the set of files that a loader reads; formats that read the same files have the same name."""
    name = load_format.name if isinstance(load_format, Enum) else str(load_format or "auto")
    return USUAL if name.lower() in SAME_FILES else name.lower()


def loader_settings(extra: Any) -> Any:
    """Plain values of `model_loader_extra_config`, a mapping or its JSON, without entries that change no weight."""
    if isinstance(extra, str):
        try:
            extra = json.loads(extra)
        except ValueError:
            return extra
    if extra is None:
        return {}
    if isinstance(extra, Mapping):
        extra = {name: value for name, value in extra.items() if name not in SPEED_ENTRIES}
    return plain_config(extra)
