"""Converts a caller's stream object to the `cudaStream_t` that the native core takes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, SupportsIndex, TypeAlias

from flexkv.errors import ContractError

PROTOCOL_VERSION = 0
"""The only version of the protocol `__cuda_stream__` that exists (documentation of cuda.core, "Interoperability")."""
LARGEST_ADDRESS = (1 << 64) - 1


class HasCudaStreamMethod(Protocol):
    """A stream of a library that implements the protocol `__cuda_stream__`: cuda.core, cuda.bindings, torch."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class HasCudaStream(Protocol):
    """A stream of a torch version that does not implement `__cuda_stream__` yet."""

    @property
    def cuda_stream(self) -> int: ...


StreamLike: TypeAlias = SupportsIndex | HasCudaStreamMethod | HasCudaStream
"""A `cudaStream_t` as an integer (0 is the default stream), or an object from which it can be read."""


def stream_address(stream: StreamLike) -> int:
    """Returns the `cudaStream_t` of `stream`. If an object has both `__cuda_stream__` and `cuda_stream`,
    `__cuda_stream__` is used.

    Raises:
        ContractError: `stream` is not a stream; the message shows its value. If the object's own code raised an
            exception, `__cause__` is that exception.
    """
    try:
        if (method := getattr(stream, "__cuda_stream__", None)) is not None:
            return _address(_of_protocol(method, stream), stream)
        return _address(getattr(stream, "cuda_stream", stream), stream)
    except ContractError:
        raise
    except Exception as error:
        raise ContractError(
            f"{_named(stream)} gives no stream: {type(error).__name__}: {_named(error, str)}"
        ) from error


def optional_stream(stream: StreamLike | None) -> int | None:
    """Returns the `cudaStream_t` of `stream`, as `stream_address` does; None if `stream` is None."""
    return None if stream is None else stream_address(stream)


def _of_protocol(method: Any, stream: object) -> object:
    if isinstance(stream, type):
        raise ContractError(f"{_named(stream)} is a class of streams, not a stream")
    if not callable(method):
        raise ContractError(f"{_named(stream)}: its __cuda_stream__ is {_named(method)}, not a method")
    answer = method()
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ContractError(
            f"{_named(stream)}: __cuda_stream__() gave {_named(answer)}, not (version, address of a cudaStream_t)"
        )
    version, address = answer
    if _whole(version) != PROTOCOL_VERSION:
        raise ContractError(
            f"{_named(stream)}: __cuda_stream__() speaks version {_named(version)} of its protocol, "
            f"and {PROTOCOL_VERSION} is understood"
        )
    return address


def _address(value: Any, stream: object) -> int:
    address = _whole(value)
    if address is None:
        raise ContractError(
            f"{_named(stream)} is no stream: a cudaStream_t as a whole number is needed, or an object with "
            f"__cuda_stream__ or cuda_stream; found {_named(value)}"
        )
    if not 0 <= address <= LARGEST_ADDRESS:
        raise ContractError(f"{_named(stream)} is no stream: {address} is not in [0, 2**64)")
    return address


def _whole(value: Any) -> int | None:
    """Returns the value as an integer; None if it is not one. A bool does not count as an integer, because a bool
    passed as a stream is a mistake.
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _named(value: object, words: Callable[[object], str] = repr) -> str:
    """Returns the value as text for a message, or its type if its own `repr` or `str` fails."""
    try:
        return f"{words(value):.80}"
    except Exception:
        return f"a {type(value).__name__}"
