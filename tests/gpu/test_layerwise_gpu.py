"""Tests the layerwise load and store pipelines on streams of a real GPU."""

from __future__ import annotations

import pytest

from tests.gpu.needs import GPU
from tests.unit.adapters.torch_layers import check_load_and_store

pytestmark = GPU


@pytest.mark.parametrize("seed", range(40))
def test_loads_and_stores_equal_the_reference(seed: int) -> None:
    check_load_and_store(seed, "cuda")
