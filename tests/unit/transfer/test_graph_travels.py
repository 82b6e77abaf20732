"""A graph that was pickled, sent and unpickled equals the original graph."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from flexkv.errors import ContractError
from flexkv.transfer.graph import (
    TAG_BYTES,
    Edge,
    EdgeKind,
    OpId,
    OpKind,
    Priority,
    TransferGraph,
    TransferOp,
)


@pytest.mark.parametrize("protocol", [2, 4, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize("layerwise", [False, True])
def test_every_field_arrives(protocol: int, layerwise: bool) -> None:
    blocks, slots = np.array([7, 3, 9], np.int32), np.array([0, 2, 1], np.int32)
    tags = np.arange(3 * TAG_BYTES, dtype=np.uint8).reshape(3, TAG_BYTES)
    store = TransferOp(OpId(2**40), OpKind.D2H, 3, Priority.STORE, blocks, slots, layerwise)
    write = TransferOp(
        OpId(5), OpKind.GDS_WRITE, 0, Priority.STORE, blocks, slots[:0], places=blocks, tags=tags
    )
    read = TransferOp(
        OpId(6), OpKind.DISK_READ, 0, Priority.LOAD, blocks[:0], slots, layerwise, places=blocks, tags=tags
    )
    reads = np.array([2**40, 0, 5], np.int64)
    load = TransferOp(OpId(7), OpKind.H2D, 0, Priority.LOAD, blocks, slots, layerwise, reads=reads)
    sent = TransferGraph((store, write, read, load), (Edge(0, 1, EdgeKind.STREAM),))
    came = pickle.loads(pickle.dumps(sent, protocol))
    assert came.edges == sent.edges
    assert len(came.ops) == 4
    for there, here in zip(came.ops, sent.ops, strict=True):
        assert type(there.kind) is OpKind
        assert type(there.priority) is Priority
        for name in ("op_id", "kind", "group", "priority", "layerwise", "pages"):
            assert getattr(there, name) == getattr(here, name), name
        for name in ("blocks", "slots", "places", "tags", "reads"):
            assert getattr(there, name).dtype == getattr(here, name).dtype
            np.testing.assert_array_equal(getattr(there, name), getattr(here, name))


@pytest.mark.parametrize("wrong", [np.array([7, 3], np.int64), np.array([[7, 3]], np.int32)])
def test_numbers_of_another_type_do_not_travel(wrong: np.ndarray) -> None:
    """A graph with block numbers of another type cannot be pickled. The numbers are sent as bytes, so the receiver
    would read wrong block numbers."""
    op = TransferOp(OpId(1), OpKind.H2D, 0, Priority.LOAD, wrong, np.array([0, 1], np.int32))
    with pytest.raises(ContractError, match=r"blocks of an op are int.* needed are int32 \[n\]"):
        pickle.dumps(op)
