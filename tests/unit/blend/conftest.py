"""Fixtures: a small model, and a segment cache for it."""

from __future__ import annotations

import pytest


@pytest.fixture
def model():
    from tests.unit.blend.blend_world import make_model  # imported late, because some tests run without torch

    return make_model()


@pytest.fixture
def cache(model):
    from tests.unit.blend.blend_world import make_cache

    found = make_cache(model)
    yield found
    found.manager.check_integrity()
    assert found.manager.inflight_ops() == 0
    found.close()
