"""Marks the work of the lanes' threads and of the layerwise stages as NVTX ranges, which profilers such as Nsight
Systems show.

Before `enable` turns ranges on, no library is searched for or loaded, and `span` returns one shared empty context.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from flexkv import c_ext
from flexkv.errors import ConfigError
from flexkv.observe import get_logger

logger = get_logger(__name__)

OFF, ON = "off", "on"
ALLOWED = "allowed are off, on, and the path of NVTX's library"
LIBRARIES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")
"""Names of NVTX's library. The first name is that of NVTX 3, in the wheel `nvidia-nvtx`, on which torch's CUDA builds
depend. The second name is that of CUDA toolkits before 12.9.
"""

_library: ctypes.CDLL | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Range:
    """A context that marks one range in the thread that enters it."""

    __slots__ = ("_library", "_name")

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, f"flexkv {name}".encode()

    def __enter__(self) -> None:
        self._library.nvtxRangePushA(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.nvtxRangePop()


def enable(setting: str) -> None:
    """Turns ranges on in this process for good, unless `setting` is `off`. Has no effect if they are on already.

    Args:
        setting: the value of `observe.nvtx`: `off`, `on`, or the path of NVTX's library.

    Raises:
        ConfigError: no library was found, or the library is not NVTX's. The message lists the places searched.
    """
    global _library
    if setting == OFF or _library is not None:
        return
    refusals = []
    for path in _candidates() if setting == ON else [setting]:
        try:
            c_ext.load_nvtx(path)
        except ConfigError as error:
            refusals.append(str(error))
            continue
        _library = ctypes.CDLL(path)
        _library.nvtxRangePushA.argtypes = [ctypes.c_char_p]
        logger.info("observe.nvtx=%s: ranges go to %s", setting, path)
        return
    hint = "; pip install nvidia-nvtx brings one, or name its path" if setting == ON else f"; {ALLOWED}"
    raise ConfigError(f"observe.nvtx={setting}: {'; '.join(refusals)}{hint}")


def span(name: str) -> AbstractContextManager[None]:
    """Returns a context that marks a range "flexkv `name`" in the thread that enters it, or an empty context if ranges
    are off."""
    return _NOTHING if _library is None else _Range(_library, name)


def _candidates() -> Iterator[str]:
    """Yields the library's names for the loader, then its paths in installed wheels."""
    yield from LIBRARIES
    for folder in sys.path:
        for name in LIBRARIES:
            yield from map(str, sorted(Path(folder or ".", "nvidia").glob(f"*/lib/{name}")))
