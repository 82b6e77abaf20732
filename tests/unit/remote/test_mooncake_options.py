"""flexkv's Mooncake store refuses invalid options when it is opened. The tests also check the error messages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv.errors import ContractError, StoreError
from flexkv.remote.base import StoreOptions
from flexkv.remote.mooncake import CLIENT_ENVIRONMENT, MooncakeStore, store

URL = "mooncake://127.0.0.1:50051"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CLIENT_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "urls",
    [
        (),
        (URL, "mooncake://127.0.0.1:50061"),
        ("mooncake://127.0.0.1",),
        ("mooncake://:50051",),
        ("mooncake://a:seventy",),
        ("mooncake://a:70000",),
        ("mooncake://a:1/path",),
        ("mooncake://a:1?x=y",),
        ("mooncake://[::1]:50051",),
        ("mooncake://someone:secret@a:1",),
    ],
)
@pytest.mark.usefixtures("environment")
def test_other_urls_are_refused(urls: tuple[str, ...]) -> None:
    with pytest.raises(StoreError, match="mooncake://HOST:PORT") as caught:
        MooncakeStore(StoreOptions(urls))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        StoreOptions((URL,), user="a"),
        StoreOptions((URL,), password="secret"),
        StoreOptions((URL,), ca_file="/ca"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_what_mooncake_does_not_have_is_refused(options: StoreOptions) -> None:
    with pytest.raises(StoreError, match="neither users nor TLS") as caught:
        MooncakeStore(options)
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("environment")
def test_absent_rdma_device_is_refused_with_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(store, "INFINIBAND", tmp_path)
    with pytest.raises(StoreError, match=r"mlx5_7 not in .* there are: mlx5_0"):
        MooncakeStore(StoreOptions((URL,), rdma_devices=("mlx5_0", "mlx5_7")))
    monkeypatch.setattr(store, "INFINIBAND", tmp_path / "none")
    with pytest.raises(StoreError, match="there are: none"):
        MooncakeStore(StoreOptions((URL,), rdma_devices=("mlx5_0",)))


@pytest.mark.usefixtures("environment")
def test_missing_library_is_named_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreError, match=r"pip install mooncake-transfer-engine-non-cuda.*libibverbs1"):
        MooncakeStore(StoreOptions((URL,)))


@pytest.mark.usefixtures("environment")
def test_control_the_library_is_there() -> None:
    MooncakeStore(StoreOptions((URL,))).close()


@pytest.mark.usefixtures("environment")
def test_process_without_the_settings_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_RPC_TIMEOUT_MS")
    with pytest.raises(StoreError, match=r"MC_RPC_TIMEOUT_MS .*CLIENT_ENVIRONMENT"):
        MooncakeStore(StoreOptions((URL,)))


@pytest.mark.usefixtures("environment")
def test_memory_that_has_gaps_or_cannot_be_written_is_refused() -> None:
    opened = MooncakeStore(StoreOptions((URL,)))
    read_only = np.frombuffer(bytes(8), np.uint8)
    parts: list[Any] = [np.zeros(8, np.uint8)[::2], read_only, np.zeros(8, np.int16)]
    for part in parts:
        with pytest.raises(ContractError):
            opened.get(["a"], [[part]], 1.0)
    with pytest.raises(ContractError):
        opened.put(["a"], [[np.zeros(8, np.uint8)[::2]]], 1.0)
    with pytest.raises(ContractError):
        opened.put(["a", "b"], [[read_only]], 1.0)
    opened.close()
