"""Extracts the settings of an engine's weight loader that determine which files it reads, and leaves out those that
affect only speed.
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
"""Load formats for which engines read the same files if the model has `*.safetensors`. If it has none, an engine with
one of these formats reads other files or refuses to start."""

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
"""Entries of `model_loader_extra_config` that determine how files are read or checked, not which files are read."""

FORMAT_RULE = (
    f"by the files that are read: {', '.join(sorted(SAME_FILES))} count as one, each other by its name"
)
EXTRA_RULE = f"its value, except the entries {', '.join(sorted(SPEED_ENTRIES))}, which change only the speed"


def files_of_format(load_format: Any) -> str:
    """A name for the set of files that a loader reads: the same for all formats in SAME_FILES, otherwise the format's
    own name."""
    name = load_format.name if isinstance(load_format, Enum) else str(load_format or "auto")
    return USUAL if name.lower() in SAME_FILES else name.lower()


def loader_settings(extra: Any) -> Any:
    """Plain values of `model_loader_extra_config` without the entries in SPEED_ENTRIES, which do not affect the
    weights.

    Args:
        extra: the setting: a mapping, its JSON text, or None. A text that is not JSON is returned unchanged.
    """
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
