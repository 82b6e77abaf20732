"""The engine accepts the streams of any library. For any other object it raises an error that names the object."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexkv.adapters.tensorrt_llm.worker import WorkerSide
from flexkv.blend.rope import RopeSpec
from flexkv.blend.rotation import KeyRotation, RowPlaces, TurnTable
from flexkv.errors import ContractError
from flexkv.transfer.engine import TransferEngine
from flexkv.transfer.graph import TransferGraph
from flexkv.transfer.stream import StreamLike, optional_stream, stream_address

ADDRESS = 0x7F00_1234_5678


class Speaks:
    """A stream with the method `__cuda_stream__`, like the streams of cuda.core."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def __cuda_stream__(self) -> Any:
        return self.answer


class SpeaksBoth(Speaks):
    """A stream like those of newer versions of torch. They have the method `__cuda_stream__` and the attribute
    `cuda_stream`."""

    cuda_stream = 5


class Broken:
    """An object that raises in `__index__` and in `__repr__`."""

    def __index__(self) -> int:
        raise ValueError("no number")

    def __repr__(self) -> str:
        raise ValueError("no name")


class Closed:
    def __cuda_stream__(self) -> Any:
        raise RuntimeError("the stream was closed")

    def __repr__(self) -> str:
        return "Closed()"


class ClosedAttribute:
    @property
    def cuda_stream(self) -> int:
        raise RuntimeError("the stream was closed")


TAKEN = [
    (0, 0),
    (1, 1),
    (ADDRESS, ADDRESS),
    (np.int64(9), 9),
    (Speaks((0, ADDRESS)), ADDRESS),
    (Speaks((0, np.uint64(2**64 - 1))), 2**64 - 1),
    (SimpleNamespace(cuda_stream=ADDRESS), ADDRESS),
    (SpeaksBoth((0, 8)), 8),
]


@pytest.mark.parametrize(("stream", "address"), TAKEN, ids=lambda value: type(value).__name__)
def test_a_stream_of_any_library_is_its_address(stream: StreamLike, address: int) -> None:
    assert stream_address(stream) == address
    assert optional_stream(stream) == address


def test_none_stays_none() -> None:
    assert optional_stream(None) is None


REFUSED = [
    (None, "None is no stream"),
    (True, "True is no stream"),
    (-1, "-1 is not in"),
    (2**64, "18446744073709551616 is not in"),
    (1.0, r"1\.0 is no stream"),
    ("stream", "'stream' is no stream"),
    (SimpleNamespace(cuda_stream="there"), "found 'there'"),
    (Speaks((1, ADDRESS)), "speaks version 1 of its protocol, and 0 is understood"),
    (Speaks((False, ADDRESS)), "speaks version False"),
    (Speaks((0, None)), "found None"),
    (Speaks((0, -4)), "-4 is not in"),
    (Speaks((0, True)), "found True"),
    (Speaks((0,)), r"gave \(0,\)"),
    (Speaks([0, ADDRESS]), r"gave \[0, "),
    (Speaks(ADDRESS), f"gave {ADDRESS}"),
    (SimpleNamespace(__cuda_stream__=(0, ADDRESS)), "not a method"),
    (SpeaksBoth((1, 8)), "speaks version 1"),
    (Speaks, "Speaks'> is a class of streams, not a stream"),
    (Speaks((np.zeros(2), ADDRESS)), r"speaks version array\(\[0\., 0\.\]\)"),
    (Speaks((0.0, ADDRESS)), r"speaks version 0\.0"),
    (Speaks((0, Broken())), "gives no stream: ValueError: no number"),
    (Broken(), "a Broken gives no stream: ValueError: no number"),
    (Speaks(Broken()), "gave a Broken"),
    (Closed(), r"Closed\(\) gives no stream: RuntimeError: the stream was closed"),
    (ClosedAttribute(), "gives no stream: RuntimeError: the stream was closed"),
]


@pytest.mark.parametrize(("stream", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_no_stream_is_named(stream: Any, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        stream_address(stream)


class Native:
    """Stands in for the native engine, and records the streams that it gets."""

    def __init__(self) -> None:
        self.streams: list[object] = []

    def submit(self, ops: Any, edges: Any, stream: object, gated: bool, after: object) -> int:
        self.streams.append(stream)
        return 1

    def open_layers(self, tickets: Any, layers: int, stream: object) -> None:
        self.streams.append(stream)

    def wait_layer(self, ticket: int, layer: int, deadline_s: float, stream: object) -> Any:
        self.streams.append(stream)
        return True, []

    def close(self, deadline_s: float) -> bool:
        return True


def calls_with(engine: TransferEngine, stream: Any) -> None:
    ticket = engine.submit(TransferGraph(()), stream=stream)
    assert ticket is not None
    engine.open_layers([ticket], 1, stream=stream)
    engine.wait_layer(ticket, 0, 1.0, stream=stream)


def test_the_engine_takes_them_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, native = TransferEngine(), Native()
    monkeypatch.setattr(engine, "_native", native)
    calls_with(engine, Speaks((0, ADDRESS)))
    calls_with(engine, SimpleNamespace(cuda_stream=ADDRESS))
    calls_with(engine, None)
    assert native.streams == [ADDRESS] * 6 + [None] * 3
    monkeypatch.setattr(engine, "_current_stream", lambda: Speaks((0, 77)))
    calls_with(engine, None)
    assert native.streams[9:] == [77, 77, None]


def test_the_engine_refuses_what_is_none_before_anything_is_queued() -> None:
    engine = TransferEngine()
    with pytest.raises(ContractError, match="speaks version 3"):
        engine.submit(TransferGraph(()), stream=Speaks((3, 1)))
    with pytest.raises(ContractError, match="'x' is no stream"):
        engine.submit(TransferGraph(()), stream="x")  # type: ignore[arg-type]
    assert engine.close(10.0)


def test_a_rotation_takes_them() -> None:
    rotation = KeyRotation(RopeSpec(head_dim=8, rotary_dim=8, theta=10000.0), heads=1, dtype="float32")
    source, target = np.arange(8, dtype=np.float32).reshape(1, 8), np.zeros((1, 8), np.float32)
    places, copies = RowPlaces(np.zeros(1, np.int64), 32), TurnTable.copies(1)
    rotation.apply(source, places, target, places, copies, stream=Speaks((0, 0)))
    assert (target == source).all()
    with pytest.raises(ContractError, match="speaks version 1"):
        rotation.apply(source, places, target, places, copies, stream=Speaks((1, 0)))


def test_a_worker_of_tensorrt_llm_takes_them() -> None:
    waited: list[tuple[int, int | None]] = []
    loads = SimpleNamespace(wait=lambda layer, stream: waited.append((layer, stream)))
    worker: Any = SimpleNamespace(device=0, layer_loads=loads)
    WorkerSide.wait_for_layer(worker, 3, Speaks((0, ADDRESS)))
    WorkerSide.wait_for_layer(worker, 4, SimpleNamespace(cuda_stream=5))
    assert waited == [(3, ADDRESS), (4, 5)]
    with pytest.raises(ContractError, match="speaks version 1"):
        WorkerSide.wait_for_layer(worker, 5, Speaks((1, 1)))
