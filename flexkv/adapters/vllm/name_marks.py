"""Marks the hashes that vLLM makes from a client's name instead of an input's content, in the process that makes them.

If a request gives an input a name and also has options for it (`mm_processor_kwargs`, `media_io_kwargs`), vLLM hashes
the name with the options. The result looks like a digest of the content, and a scheduler could not distinguish the two.
The mark gives it another form.

vLLM loads this module in each of its processes, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

HASHER = "vllm.multimodal.hasher"
"""The module in which vLLM makes every hash of an input."""

PREFIX = "client-"
"""The mark, put before a hash of a client's name; no digest begins with it."""

_IS_MARKING = "flexkv_marks_names"
MODEL = "model_id"
EARLIER = "mm_hash"
"""The argument for a name that vLLM made itself and hashes again, with the options of one of several videos."""


def mark_names(hasher: ModuleType) -> None:
    """Makes the module's hashes of names begin with `PREFIX` from now on. Idempotent.

    Raises:
        AttributeError: this version of vLLM makes its hashes elsewhere.
    """
    owner = hasher.MultiModalHasher
    plain = owner.hash_kwargs
    if marks_names(hasher):
        return

    @functools.wraps(plain)
    def hash_kwargs(cls: type, /, *arguments: Any, **values: Any) -> str:
        name = str(plain(*arguments, **values))
        return PREFIX + name if _has_clients_name(values) else name

    setattr(hash_kwargs, _IS_MARKING, True)
    owner.hash_kwargs = classmethod(hash_kwargs)


def marks_names(hasher: ModuleType) -> bool:
    """Whether this process marks hashes of names."""
    plain = getattr(getattr(hasher, "MultiModalHasher", None), "hash_kwargs", None)
    return hasattr(plain, _IS_MARKING)


def _has_clients_name(values: dict[str, Any]) -> bool:
    """Whether a client's name stands in for an input. Inputs are bytes, arrays, images and the like, so a string in
    place of one is a name that a client gave."""
    return any(
        isinstance(value, str) and (value.startswith(PREFIX) if name == EARLIER else name != MODEL)
        for name, value in values.items()
    )
