"""The layerwise pipelines on a GPU's own streams."""

from __future__ import annotations

import pytest

from flexkv import c_ext
from tests.unit.adapters.torch_layers import check_load_and_store

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(40))
def test_loads_and_stores_equal_the_reference(seed: int) -> None:
    found = c_ext.cuda_info()
    if not found["device_count"]:
        pytest.skip(f"no GPU: {found['reason']}")
    check_load_and_store(seed, "cuda")
