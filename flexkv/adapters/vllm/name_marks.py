"""Puts a prefix before hashes that vLLM makes from a client's name for an input instead of from the input's content.

vLLM makes such hashes in two cases. A PIL image may carry a UUID as its EXIF entry ImageID; vLLM then hashes only the
UUID. Or a request names an input and also has options for it (`mm_processor_kwargs`, `media_io_kwargs`); vLLM then
hashes the name with the options. Without the prefix, a scheduler could not distinguish such a hash from a digest of the
content. Each process that makes hashes applies this change to vLLM.

vLLM loads this module in each of its processes, so the module imports nothing large.
"""

from __future__ import annotations

import functools
import uuid
from types import ModuleType
from typing import Any

HASHER = "vllm.multimodal.hasher"
"""The module in which vLLM makes every hash of an input."""

PREFIX = "client-"
"""The prefix of each hash of a client's name. No digest begins with it."""

IMAGE_ID = 0x800D
"""Number of the EXIF entry ImageID."""

_IS_MARKING = "flexkv_marks_names"
MODEL = "model_id"
EARLIER = "mm_hash"
"""Name of the argument of `hash_kwargs` that is itself a hash: if a request has several videos, vLLM hashes an earlier
hash again with the options of one video."""


def mark_names(hasher: ModuleType) -> None:
    """Changes vLLM's module so that its hashes of clients' names begin with `PREFIX`. Idempotent.

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
    """Whether `mark_names` has changed vLLM's module in this process."""
    plain = getattr(getattr(hasher, "MultiModalHasher", None), "hash_kwargs", None)
    return hasattr(plain, _IS_MARKING)


def _has_clients_name(values: dict[str, Any]) -> bool:
    """Whether one of the hashed values is a client's name for an input. Inputs are bytes, arrays, images and the like,
    so a string in place of an input is a name."""
    return any(
        (value.startswith(PREFIX) if name == EARLIER else name != MODEL)
        if isinstance(value, str)
        else _has_image_id(value)
        for name, value in values.items()
    )


def _has_image_id(value: Any) -> bool:
    """Whether a value is a PIL image (or vLLM's wrapper of one) for which vLLM hashes the client's UUID."""
    try:
        return isinstance(getattr(value, "media", value).getexif().get(IMAGE_ID), uuid.UUID)
    except Exception:  # no image, or one with damaged EXIF data, whose content vLLM hashes
        return False
