"""Pytest marks for GPU tests. They skip a test, with a reason, if the machine or the build cannot run it."""

from __future__ import annotations

import pytest

from flexkv import c_ext

FOUND = c_ext.cuda_info()

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not FOUND["device_count"], reason=f"no GPU: {FOUND['reason']}"),
]

CUDA_BUILD = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (FOUND["built"] and FOUND["device_count"]),
        reason=f"needs an NVIDIA GPU and a CUDA build: {FOUND['reason']}",
    ),
]
