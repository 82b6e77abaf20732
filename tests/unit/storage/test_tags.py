"""The fields of a tag have the offsets that the C++ code expects."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.errors import ContractError
from flexkv.storage.tags import TAG, make_tags, tag_fields
from flexkv.transfer.graph import TAG_BYTES


def test_every_field_is_where_the_native_twin_looks() -> None:
    offsets = {name: TAG.fields[name][1] for name in TAG.names}  # type: ignore[index, union-attr]
    assert offsets == {"key": 0, "generation": 16, "expiry": 24, "epoch": 32, "tokens": 36}


def test_fields_come_back() -> None:
    keys = np.arange(32, dtype=np.uint8).reshape(2, 16)
    generations = np.array([2**63, 7], np.uint64)
    tags = make_tags(keys, 3, generations, np.array([16, 5], np.int32), 1_700_000_000)
    assert tags.shape == (2, TAG_BYTES)
    assert tags.flags.c_contiguous
    fields = tag_fields(tags)
    np.testing.assert_array_equal(fields["key"], keys)
    np.testing.assert_array_equal(fields["generation"], generations)
    assert fields["epoch"].tolist() == [3, 3]
    assert fields["tokens"].tolist() == [16, 5]
    assert fields["expiry"].tolist() == [1_700_000_000] * 2


@pytest.mark.parametrize(
    ("keys", "generations", "message"),
    [
        (np.zeros((2, 15), np.uint8), np.zeros(2, np.uint64), r"uint8 \[2, 15\]"),
        (np.zeros((2, 16), np.int8), np.zeros(2, np.uint64), r"int8 \[2, 16\]"),
        (np.zeros(32, np.uint8), np.zeros(2, np.uint64), r"uint8 \[32\]"),
        (np.zeros((2, 16), np.uint8), np.zeros(3, np.uint64), r"2 keys with generations of shape \[3\]"),
    ],
)
def test_other_shapes_are_refused(keys: np.ndarray, generations: np.ndarray, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        make_tags(keys, 0, generations, 16)
