"""What an engine's loader of weights decides: which of the files it reads, not how fast."""

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
"""Formats by which loaders read the same files where a model has `*.safetensors`. A model without them has files that
these formats fall back to, or do not start with."""

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
    """Which of a model's files a loader reads, by a name that formats with the same files share."""
    name = load_format.name if isinstance(load_format, Enum) else str(load_format or "auto")
    return USUAL if name.lower() in SAME_FILES else name.lower()


def loader_settings(extra: Any) -> Any:
    """Plain values of `model_loader_extra_config`, a mapping or its JSON, without what changes no weight."""
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
