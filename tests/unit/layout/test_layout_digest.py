"""The native digest equals the digest of the reference implementation, which follows docs/digest.md."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv import c_ext
from flexkv.errors import GeometryError
from tests.unit.layout.digest_reference import run_digest as reference


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 20000), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_native_equals_reference(size: int, seed: int, misalignment: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size + misalignment, dtype=np.uint8)[misalignment:]
    assert c_ext.run_digest(data) == reference(data.tobytes())


def test_page_digests_name_the_damaged_run() -> None:
    sizes = [5000, 64, 4096, 1]
    pool = np.zeros(4 * sum(sizes), np.uint8)
    starts = np.cumsum([0, *sizes[:-1]])
    rows = [
        [pool.ctypes.data + 4 * s, n, n, s, i] for i, (s, n) in enumerate(zip(starts, sizes, strict=True))
    ]
    view = c_ext.KvView(np.array(rows, np.int64), 4, sum(sizes))
    stripe = np.random.default_rng(1).integers(0, 256, view.stripe_bytes, dtype=np.uint8)
    good = c_ext.page_digests(view, stripe)
    assert good.dtype == np.uint64
    assert good.tolist() == [
        reference(stripe[s : s + n].tobytes()) for s, n in zip(starts, sizes, strict=True)
    ]
    for run, start in enumerate(starts.tolist()):
        stripe[start] ^= 1
        assert np.flatnonzero(c_ext.page_digests(view, stripe) != good).tolist() == [run]
        stripe[start] ^= 1
    with pytest.raises(GeometryError, match="the stripe has"):
        c_ext.page_digests(view, stripe[:-1])
