"""vLLM 0.33 has every name that the adapter touches."""

from __future__ import annotations

import pytest

from build_support.vllm_names import absent_in
from tests.engines_vllm33.conftest import Cases, Found
from tests.unit.adapters.vllm_interface import INTERFACES


@pytest.fixture(scope="module")
def found(cases: Cases) -> Found:
    return cases.run("names", None)


def test_this_version_has_every_name(found: Found) -> None:
    assert found["version"] == "0.33.0"
    assert set(found["missing"]) == absent_in("0.33") == frozenset()
    assert found["control"] == ["vllm:NoSuchName"]


def test_the_connector_takes_every_call_of_this_version(found: Found) -> None:
    hooks = {name: tuple(parameters) for name, parameters in found["hooks"].items()}
    assert hooks == INTERFACES[(0, 33)]
    assert found["misfits"] == []
