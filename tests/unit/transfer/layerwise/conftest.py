"""Gives each test a device of plain memory. After the test, checks that the device's threads have ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexkv.transfer.layerwise.host_device import HostDevice
from tests.unit.transfer.layerwise.layer_world import GENEROUS_S


@pytest.fixture(params=[True, False], ids=["one thread", "a thread for each stream"])
def host(request: pytest.FixtureRequest) -> Iterator[HostDevice]:
    device = HostDevice(one_thread=request.param)
    yield device
    assert device.close(GENEROUS_S), "a stream's thread did not end"
