"""Cases of the fuzzer. A case is a few consecutive calls on shared objects. The calls depend only on the seed and the
number of the case.

Each call has its own seed, so that a case can be run again with some of its calls left out.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from flexkv.errors import ConfigError, ContractError, FlexKVError
from tests.unit.native_border import hostile
from tests.unit.native_border.arguments import NEED_A_GPU, valid_argument, valid_arguments
from tests.unit.native_border.recipes import NOT_MADE, RECIPES
from tests.unit.native_border.surface import Parameter, Target, classes, targets
from tests.unit.native_border.world import TICKET_S, World

MOST_CALLS = 6
JOIN_S = 60.0
AT_ONCE = 0.2
"""Share of the calls that run at the same time as another call in a second thread: the same call, or a valid call of
the same class."""
TURNS = 3
"""Number of times that each of two concurrent calls is repeated, because a single pair of calls seldom overlaps."""

RAW_ADDRESSES = {
    ("transfer_kv_blocks*", "gpu_*"): "addresses of an engine's tensors, and what is added to them",
    ("transfer_kv_blocks*", "*_layer*"): "which address is taken, and how far from it",
    ("transfer_kv_blocks*", "is_mla"): "how many tensors there are",
    ("transfer_kv_blocks*", "block_size_in_bytes"): "bytes from an address on",
    ("GDSManager.__init__", "engine_stream"): "a cudaStream_t",
    ("rotate_rows", "stream"): "a cudaStream_t",
}
"""Arguments that the core must trust, because it cannot check that the memory exists. They get only null, misaligned or
negative values, values of a wrong type, and valid values. The core also trusts a `KvView`, so the fuzzer drops views
with hostile runs, and never lets the core read through them.
"""

TIMED_SIZES = {
    ("time_transform", "blocks"): "moved as often as asked",
    ("time_transform", "layers"): "the same",
    ("time_transform", "repeats"): "the same",
}
"""Sizes to which the duration of a call is proportional, and the reason. Under a sanitizer, two concurrent calls with a
size of 65,535 take a minute.
"""
MOST_TIMED = 1024
REFUSED_SIZE = 2**31 - 1

EXPECTED = (FlexKVError, TypeError, ValueError, hostile.HostileError)


class Wrong(Exception):
    """Raised if a call ended in a way that is not allowed. The message describes how it ended."""


@dataclass(frozen=True, slots=True)
class Call:
    target: Target
    seed: int


class Fuzzer:
    """Makes and runs the cases of one seed.

    Args:
        say: called with a description of each call before it is made.
        at_once: share of the calls that run at the same time as another call.
    """

    def __init__(
        self,
        module: ModuleType,
        seed: int,
        folder: Path,
        say: Callable[[str], None],
        at_once: float = AT_ONCE,
    ) -> None:
        self.module, self.seed, self.folder, self.say = module, seed, folder, say
        self.at_once = at_once
        self.targets = targets(module)
        self.classes = classes(module)
        self.returned: dict[str, int] = {}
        self.raised: dict[str, int] = {}

    def calls(self, case: int) -> list[Call]:
        rng = random.Random(f"{self.seed}/{case}")
        # The first calls of consecutive cases cycle through all targets, so that every target is called.
        first = self.targets[(case + self.seed) % len(self.targets)]
        near = [t for t in self.targets if t.owner == first.owner] if first.owner else self.targets
        chosen = [first]
        for _ in range(rng.randrange(MOST_CALLS)):
            chosen.append(rng.choice(near if rng.random() < 0.6 else self.targets))
        return [Call(target, rng.getrandbits(32)) for target in chosen]

    def run(self, case: int, only: Sequence[int] | None = None) -> None:
        """Runs a case on new objects.

        Args:
            only: numbers of the calls to make; None makes all.

        Raises:
            Wrong: a call ended in a way that is not allowed.
        """
        world = World(self.folder)
        try:
            for number, call in enumerate(self.calls(case)):
                if only is None or number in only:
                    self._call(call, world, f"case {case} call {number}")
            self.say(f"case {case} end")
        finally:
            world.close()

    def run_valid(self, target: Target) -> None:
        """Makes the call once with valid arguments. Raises the errors of the call, except those of calls that need a
        GPU."""
        world = World(self.folder)
        try:
            self.say(target.name)
            self._function(target, world, None)(**valid_arguments(target, world))
        except (ConfigError, ContractError):
            if target.name not in NEED_A_GPU:
                raise
        finally:
            world.close()

    def _call(self, call: Call, world: World, place: str) -> None:
        rng = random.Random(call.seed)
        target = call.target
        try:
            function = self._function(target, world, rng)
            given = rng.getrandbits(32)
            positional, named = self._arguments(target, world, random.Random(given))
            made = partial(self._make, target, function, positional, named)
            beside, name = self._beside(target, function, given, world, rng)
        except FlexKVError:
            return  # an earlier call of the case has closed an object that this call needs
        self.say(f"{place}: {describe(target, positional, named)}{name}")
        if beside is None:
            made()
        else:
            self._at_once(made, beside)

    def _beside(
        self, target: Target, function: Callable[..., object], given: int, world: World, rng: random.Random
    ) -> tuple[Callable[[], None] | None, str]:
        """Returns two values: the call that another thread makes at the same time, or None; and the text with which the
        log describes that call."""
        roll = rng.random()
        if roll > self.at_once:
            return None, ""
        if roll > self.at_once / 2 or target.owner in NOT_MADE:
            # The two calls get the same objects but not the same buffers. If two calls write into one buffer, the race
            # is their caller's fault.
            positional, named = self._arguments(target, world, random.Random(given))
            return partial(self._make, target, function, positional, named), " twice at once"
        other = rng.choice([t for t in self.targets if t.owner == target.owner])
        function = self._function(other, world, None)
        named = valid_arguments(other, world)
        return partial(self._make, other, function, (), named), f" beside a good {other.name}"

    def _make(
        self,
        target: Target,
        function: Callable[..., object],
        positional: Sequence[object],
        named: dict[str, object],
    ) -> None:
        try:
            function(*positional, **named)
        except EXPECTED as error:
            if isinstance(error, UnicodeError):
                raise Wrong(f"{type(error).__name__}: {error}") from error
            self.raised[target.name] = self.raised.get(target.name, 0) + 1
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error
        else:
            self.returned[target.name] = self.returned.get(target.name, 0) + 1

    def _at_once(self, *calls: Callable[[], None]) -> None:
        begin = threading.Barrier(len(calls))
        wrong: list[Wrong] = []

        def body(call: Callable[[], None]) -> None:
            begin.wait()
            try:
                for _ in range(TURNS):
                    call()
            except Wrong as error:
                wrong.append(error)

        threads = [threading.Thread(target=body, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                raise Wrong(f"has not returned after {JOIN_S} s")
        if wrong:
            raise wrong[0]

    # --- functions to call, and objects to call them on ---

    def _function(self, target: Target, world: World, rng: random.Random | None) -> Callable[..., object]:
        """Returns the function to call. A method is bound to a valid object or, if `rng` is given, sometimes to an
        invalid one.
        """
        if not target.owner:
            return getattr(self.module, target.member)  # type: ignore[no-any-return]
        cls = self.classes[target.owner]
        if target.kind == "constructor":
            return cls if rng is None or rng.random() < 0.9 else self._heir(cls)
        if target.kind == "static":
            return getattr(cls, target.member)  # type: ignore[no-any-return]
        made = self._object(target.owner, world, rng)
        member = vars(cls)[target.member]
        if target.kind == "property":
            return lambda: member.fget(made)
        return lambda *args, **kwargs: member(made, *args, **kwargs)

    def _object(self, name: str, world: World, rng: random.Random | None) -> object:
        roll = 0.0 if rng is None else rng.random()
        if roll < 0.75 and name in RECIPES:
            return world.get(name)
        if roll < 0.85 and name in RECIPES:
            return world.fresh(name)
        assert rng is not None, f"{name} has no recipe"
        return self._no_object(name, rng)

    def _no_object(self, name: str, rng: random.Random) -> object:
        """Returns an object to pass instead of an instance of the class: None, an instance that was never initialised,
        or an arbitrary other object.
        """
        cls = self.classes.get(name, object)
        heir = self._heir(cls)
        made: tuple[Callable[[], object], ...] = (
            lambda: None,
            lambda: blank(cls),
            lambda: blank(heir),
            lambda: cls,
            lambda: blank(rng.choice(list(self.classes.values()))),
            lambda: hostile.anything(rng),
        )
        return rng.choice(made)()

    def _heir(self, cls: type) -> type:
        return type("Heir", (cls,), {})

    # --- arguments ---

    def _arguments(
        self, target: Target, world: World, rng: random.Random
    ) -> tuple[list[object], dict[str, object]]:
        if target.owner in NOT_MADE and target.kind == "method":
            named = {p.name: hostile.anything(rng) for p in target.parameters}
        else:
            named = valid_arguments(target, world)
        count = rng.choices((0, 1, 2, len(target.parameters)), (10, 60, 22, 8))[0]
        for parameter in rng.sample(target.parameters, min(count, len(target.parameters))):
            bad = self._hostile(target, parameter, world, rng)
            if named_in(TIMED_SIZES, target, parameter) and isinstance(bad, int) and bad < REFUSED_SIZE:
                bad = min(bad, MOST_TIMED)
            named[parameter.name] = bad
        deadline = named.get("deadline_s")
        if "gated" in world.kept and isinstance(deadline, int | float) and deadline > TICKET_S:
            # A wait for a gated graph lasts until its deadline, because nobody opens the graph's layers. So the
            # deadline is short.
            named["deadline_s"] = TICKET_S
        positional: list[object] = []
        if rng.random() < 0.05:
            named[rng.choice(("other", "self", "\ud800"))] = None
        if rng.random() < 0.05:
            positional.append(hostile.anything(rng))
        if named and rng.random() < 0.05:
            named.pop(rng.choice(list(named)))
        return positional, named

    def _hostile(self, target: Target, parameter: Parameter, world: World, rng: random.Random) -> object:
        valid = valid_argument(parameter, world, target)
        if named_in(RAW_ADDRESSES, target, parameter):
            return _bad_address(valid, rng)
        if rng.random() < 0.2:
            return hostile.anything(rng)
        return self._hostile_like(valid, parameter, rng)

    def _hostile_like(self, valid: Any, parameter: Parameter, rng: random.Random) -> object:
        """Returns a hostile value of the same kind as `valid`."""
        name = type(valid).__name__
        if name in self.classes:
            return self._no_object(rng.choice((name, name, *self.classes)), rng)
        if isinstance(valid, list | tuple):
            items = [item for item in valid if type(item).__name__ in self.classes] or list(valid)
            if items and rng.random() < 0.4:
                bad = [*items, self._hostile_like(items[0], parameter, rng)]
                return bad if rng.random() < 0.7 else hostile.sequence(rng, bad)
            return hostile.sequence(rng, valid)
        if isinstance(valid, dict):
            return hostile.mapping(rng, valid)
        if type(valid).__module__ == "numpy":
            wanted = str(valid.dtype.str).lstrip("<|")
            return hostile.tensor(rng) if parameter.annotation == "object" else hostile.numbers(rng, wanted)
        if isinstance(valid, bytearray | bytes):
            return hostile.buffer(rng)
        if isinstance(valid, str):
            return hostile.text(rng)
        if isinstance(valid, float) or "float" in parameter.annotation:
            return hostile.floating(rng)
        return hostile.integer(rng)


def blank(cls: Any) -> object:
    """Returns an object of the class whose `__init__` has not run."""
    return cls.__new__(cls)


def named_in(table: dict[tuple[str, str], str], target: Target, parameter: Parameter) -> bool:
    return any(fnmatch(target.name, call) and fnmatch(parameter.name, name) for call, name in table)


def _bad_address(valid: Any, rng: random.Random) -> object:
    """Returns either the valid value, or a value that the core must refuse before it uses an address."""
    if type(valid).__module__ == "numpy":
        wrong = valid.astype("f8")
        return rng.choice(
            (valid, valid[:0], valid[::-1], 0 * valid - 1, wrong, hostile.Raising(), None, [1], "a")
        )
    if isinstance(valid, bool):
        return rng.choice((valid, None, "a", 1.5))
    return rng.choice((valid, -1, -(2**63), 2**63, 2**64, None, "a", float("nan"), 1.5, hostile.Raising()))


def describe(target: Target, positional: Sequence[object], named: dict[str, object]) -> str:
    given = [_shown(value) for value in positional]
    given += [f"{name!a}={_shown(value)}" for name, value in named.items()]
    return f"{target.name}({', '.join(given)})"


def _shown(value: object) -> str:
    """Returns the text with which the log shows a value: its beginning, or its type and shape. For other objects the
    text is only the type, because hostile objects may raise in `__repr__`.
    """
    kind = type(value).__name__
    if kind in ("int", "float", "str", "bytes", "bool", "NoneType"):
        return ascii(value)[:60]
    if kind == "ndarray":
        return f"ndarray({value.dtype}, {value.shape})"  # type: ignore[attr-defined]
    if kind in ("list", "tuple"):
        return f"{kind}[{', '.join(_shown(item) for item in value[:4] if item is not value)}]"  # type: ignore[index]
    return kind
