"""The tag of a page: the values that the trailer in a disk slot must have before the slot's bytes are served."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ContractError
from flexkv.transfer.graph import NEVER, TAG_BYTES, PageTags

TAG = np.dtype(
    [("key", "u1", 16), ("generation", "<u8"), ("expiry", "<u8"), ("epoch", "<u4"), ("tokens", "<u4")]
)
"""One tag, with the same layout as in `csrc/storage/page_tag.h`.

key: the block's key. generation: a number from `Volumes.next_generations`, different for each write of a slot. expiry:
the Unix time in seconds at which the page becomes a miss; 0 for never. epoch: epoch of the model's weights. tokens:
number of valid tokens in the block.
"""

assert TAG.itemsize == TAG_BYTES

TagFields = NDArray[np.void]
"""Tags as an array with the fields `tags["key"]`, `tags["generation"]` and so on; dtype TAG, shape [pages]."""


def make_tags(
    keys: NDArray[np.uint8],
    epoch: int,
    generations: NDArray[np.uint64],
    tokens: NDArray[np.int32] | int,
    expiries: NDArray[np.uint64] | int = NEVER,
) -> PageTags:
    """Returns the tags of pages, uint8 [pages, TAG_BYTES], in the form that a TransferOp carries.

    Args:
        keys: key of each page, uint8 [pages, 16].
        epoch: epoch of the weights, in [0, 2**32).
        generations: generation of each page, uint64 [pages]; for a read, the one in the index.
        tokens: valid tokens of each page, int32 [pages], or one number for all.
        expiries: when each page expires, in Unix seconds, uint64 [pages], or one number for all; NEVER for never. A
            read ignores them.

    Raises:
        ContractError: `keys` has a different shape or dtype, or `generations` a different shape.
    """
    if keys.ndim != 2 or keys.shape[1] != 16 or keys.dtype != np.uint8:
        raise ContractError(f"keys must be uint8 [pages, 16], given {keys.dtype} {list(keys.shape)}")
    if generations.shape != (len(keys),):
        raise ContractError(f"{len(keys)} keys with generations of shape {list(generations.shape)}")
    tags = np.empty(len(keys), TAG)
    tags["key"] = keys
    tags["generation"] = generations
    tags["expiry"] = expiries
    tags["epoch"] = epoch
    tags["tokens"] = tokens
    return tags.view(np.uint8).reshape(len(keys), TAG_BYTES)


def tag_fields(tags: PageTags) -> TagFields:
    """A view of `tags` by field, without a copy."""
    return tags.reshape(-1).view(TAG)
