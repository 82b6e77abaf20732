from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def torch() -> Any:
    """Returns the module torch. Skips the test if torch is not installed or has no CUDA."""
    module = pytest.importorskip("torch", reason="the GPU tests hold pools and keys in torch's tensors")
    if not module.cuda.is_available():
        pytest.skip("torch was built without CUDA")
    return module
