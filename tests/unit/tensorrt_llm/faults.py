"""Makes movers whose copies fail or stall."""

from __future__ import annotations

from typing import Any

from flexkv import c_ext
from flexkv.transfer.graph import OpKind
from tests import testing_ext


class Faults:
    """Makes movers that follow one fault rule. `mover` is the mover that was made last."""

    def __init__(self, action: int, kind: OpKind, times: int = -1, **where: Any) -> None:
        self._rule = testing_ext.FaultRule(action, kind=int(kind), times=times, **where)
        self.mover: Any = None

    def __call__(self) -> Any:
        self.mover = testing_ext.FaultyMover(c_ext.HostMover(), [self._rule])
        return self.mover
