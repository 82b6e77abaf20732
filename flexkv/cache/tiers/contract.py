"""The contract of a tier: one place that pages lie in.

Host memory is the hub: the tier with number 0, which every other one reads into and is written from. What another tier
can do is said by its facets: a `Source` fills host slots, a `Sink` takes pages from them, routes move pages straight
between the tier and engine blocks. The manager knows tiers by their number alone.

Driven by the manager's thread; nothing here but `finish_reset` and `close` may wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.c_ext import BlockIndex
from flexkv.cache.base import EntryIds
from flexkv.cache.tiers.routes import LoadRoute, StoreRoute, StraightLoads
from flexkv.errors import ConfigError
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, OpResult, SlotIds, TransferGraph, TransferOp

logger = get_logger(__name__)


Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a metric, and its labels with their values."""


class WriteMode(Enum):
    """When a page of host memory goes to a tier."""

    THROUGH = "through"
    """As soon as it is in host memory: the tier has everything, and the most is written."""
    BACK = "back"
    """When the tier has nothing else to do, and before the page leaves host memory."""
    EVICT = "evict"
    """Only when it is about to leave host memory: the least is written, and a crash loses what host memory held."""
    REUSE = "reuse"
    """When an engine has loaded it from host memory: it came back once, and may again."""
    OFF = "off"
    """Pages are not written here from host memory."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """What the manager needs to know of a tier. Counts are pages unless they say otherwise.

    Attributes:
        name: for people: settings, metrics, log.
        wait_s: a request waits for this tier so long, then goes on without it.
        streams: pages on their way to host memory may be promised to an engine that computes what a load did not bring:
            the plane settles each page in the pool's words before its op ends.
        stream_layers: such ops bring ranges of layers of all their pages, one after the other.
        fetch_pages: on their way to host memory at most; a longer hit is cut to what fits.
        fetch_ops: fetches in flight at most, and as many writes.
        write: when pages of host memory are written here.
        write_pages: with a write in flight at most; more wait.
        waiting_pages: that may wait for their write; beyond it they are dropped and counted.
        write_at_close: a close writes what only host memory has.
        copies_unchecked: pages are written as host memory has them: where a load finds one damaged there, this tier may
            have the damage too.
    """

    name: str
    wait_s: float = 30.0
    streams: bool = False
    stream_layers: bool = False
    fetch_pages: int = 65_536
    fetch_ops: int = 256
    write: WriteMode = WriteMode.OFF
    write_pages: int = 4096
    waiting_pages: int = 65_536
    write_at_close: bool = True
    copies_unchecked: bool = True

    @property
    def label(self) -> str:
        """Of metrics."""
        return self.name.split()[0]

    def check(self) -> None:
        """
        Raises:
            ConfigError: a bound is not positive; names it.
        """
        for name in ("wait_s", "fetch_pages", "fetch_ops", "write_pages", "waiting_pages"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{self.name} tier: {name}={getattr(self, name)}; allowed are values above 0"
                )


@dataclass(slots=True)
class TierCounts:
    """Running totals of one tier, in pages unless they say otherwise.

    Attributes:
        written: pages whose write ended well.
        failed_writes: pages whose write did not.
        dropped_writes: pages never written, because a queue or the tier was full.
        lost: pages that left host memory before they were written.
        read: pages brought to host memory and verified.
        failed_reads: pages that were not: damaged, torn, of another write, or the tier failed.
        unread: pages whose fetch was planned and never begun, through no fault of theirs or the tier's, or whose
            weights are gone.
        expired: pages found past their time to live.
        evicted: pages that left the tier to make room.
        gone: pages lost with a volume.
        waits: lookups that waited for the tier.
        prefetched: pages whose fetch was begun before a lookup asked for them.
        late: lookups that went on without it, because it took too long.
        left: lookups of which a part was left to the engine, because it computes that sooner.
        left_pages: pages of those.
        no_room: lookups that went on without some of the tier's pages, because no host slot, or place among the reads
            in flight, was there for them in time.
        no_room_pages: pages of those.
        gds_read: pages loaded and verified without a page of host memory.
        gds_written: pages written without one; they are among `written`.
        hits: blocks that an engine took of what the tier had supplied.
    """

    written: int = 0
    failed_writes: int = 0
    dropped_writes: int = 0
    lost: int = 0
    read: int = 0
    failed_reads: int = 0
    unread: int = 0
    expired: int = 0
    evicted: int = 0
    gone: int = 0
    waits: int = 0
    prefetched: int = 0
    late: int = 0
    left: int = 0
    left_pages: int = 0
    no_room: int = 0
    no_room_pages: int = 0
    gds_read: int = 0
    gds_written: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class TierRoom:
    """What a tier has room for, for people.

    Attributes:
        pages: in all.
        setting: that sizes the tier.
        shares: how often the setting's bytes are taken, such as disks in use.
        more: what else is to be said of it.
    """

    pages: int
    setting: str
    shares: int
    more: str


class Plane(Protocol):
    """Moves the pages of a tier's ops. One result an op, after its last byte has stopped moving."""

    def submit(self, graph: TransferGraph) -> int | None:
        """None when the queue is full: the op ends as not executed."""

    def poll(self) -> list[OpResult]: ...
    def close(self, deadline_s: float) -> bool: ...


class Source(ABC):
    """A tier that can fill host slots."""

    @abstractmethod
    def plan_fetch(
        self,
        op_id: OpId,
        group: int,
        keys: Keys,
        entries: EntryIds,
        places: SlotIds,
        slots: SlotIds,
        layerwise: bool,
    ) -> TransferOp:
        """An op that brings pages to host slots. Its tags say what each slot must hold.

        Args:
            entries: of `keys`, each leased by the lookup; the op takes the lease over.
            places: of `entries`.
            layerwise: by ranges of layers, where the tier can.
        """

    @abstractmethod
    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        """All has stopped: entries are unpinned, and those marked in `suspect`, which were not what was asked for, are
        forgotten."""

    @abstractmethod
    def tokens_of(self, plan: TransferOp) -> NDArray[np.integer] | None:
        """Valid tokens of each page of a fetch; None where all of the tier's are whole blocks."""


class Prober(ABC):
    """A tier that has to be asked what it has. What it answers is in its `presence` when the question has ended.

    Attributes:
        probe_s: a request waits so long for an answer, then goes on without the tier.
    """

    probe_s: float

    @abstractmethod
    def ask(self, op_id: OpId, asked: Sequence[Keys], tokens: NDArray[np.int32] | None = None) -> bool:
        """Asks for pages; False: nothing is asked, and what `presence` does not have is a miss.

        Args:
            op_id: number of the question.
            asked: per group, keys in the order of the request. Of a group that restores whole prefixes the answer may
                end with the first page that is not there.
            tokens: valid tokens of each page, the same in every group; None for whole blocks.
        """

    @abstractmethod
    def answers(self) -> list[OpId]:
        """The questions that have ended since the last call."""


class Sink(ABC):
    """A tier that takes pages from host slots."""

    @abstractmethod
    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are here or on their way here, bool [keys]."""

    @abstractmethod
    def plan_write(
        self, op_id: OpId, group: int, keys: Keys, slots: SlotIds, tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer], EntryIds, TransferOp | None]:
        """Gives pages a place, evicting what is used least. What lay there is announced as gone before.

        Returns:
            Positions in `keys` of those that got a place, their entries (pinned until `end_write`), and the op.
        """

    @abstractmethod
    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Makes pages visible here whose bytes are all in place; returns which became so."""

    @abstractmethod
    def used(self, group: int, keys: Keys) -> None:
        """Pages that were used from host memory count as used here too."""

    @abstractmethod
    def room(self, group: int) -> int:
        """Pages of the group that the tier holds at most now."""


class Tier(ABC):
    """One place that pages lie in.

    Attributes:
        facts: what the manager needs to know of it.
        presence: its pages' keys.
        down: why it cannot be used any more; empty while it can. What it holds is a miss then, and nothing is written.
        held: why it may not be used yet; empty once it may. What it holds is a miss until then, and what is to be
            written waits.
        source, sink, prober, loads, stores: what it can do; None for what it cannot. `loads` bring its pages to engine
            blocks, `stores` take them from there.
        straight: `loads`, of a tier other than the hub.
        plane: moves the pages of its own ops; None where the ranks do.
        durable_pages: written so that they would survive a crash.
    """

    facts: TierFacts
    presence: BlockIndex
    counts: TierCounts
    down: str = ""
    held: str = ""
    durable_pages: int = 0
    source: Source | None = None
    sink: Sink | None = None
    prober: Prober | None = None
    loads: LoadRoute | None = None
    straight: StraightLoads | None = None
    stores: StoreRoute | None = None
    plane: Plane | None = None

    @abstractmethod
    def leading(self, group: int, keys: Keys) -> EntryIds:
        """The entries of the leading keys that are here."""

    @abstractmethod
    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are here, bool [keys]. Drops those of them whose time is over (`BlockIndex.set_expiry`)."""

    @abstractmethod
    def forget(self, group: int, keys: Keys) -> int:
        """Misses from now on; pinned pages leave with their last pin. Returns how many were known."""

    @abstractmethod
    def begin_reset(self) -> None:
        """Everything is a miss at once, and what is in flight will not become visible. Never waits."""

    @abstractmethod
    def finish_reset(self, ends_s: float) -> None:
        """Returns when nothing older is served, not even after a crash; what cannot say so by `ends_s`, on the
        monotonic clock, is taken out."""

    @abstractmethod
    def poll(self, now_s: float) -> None:
        """Takes news of what lies below: lost volumes, durable pages, a state. Called a few times a second."""

    def go_down(self, reason: str) -> None:
        """It cannot be used any more."""
        if not self.down:
            logger.error("the %s tier is off: %s", self.facts.name, reason)
            self.down = reason

    @property
    def in_use(self) -> bool:
        """Whether it may be asked and written to now."""
        return not self.down and not self.held

    def hold(self, reason: str) -> None:
        """It may not be used before `open_for`. Called before its first use."""
        self.held = reason

    def begin_open(self, weights: bytes) -> int:
        """Begins to forget what was computed with other weights, for good. `open_for` follows, when `opens` says no.
        Never waits.

        Args:
            weights: 32 bytes that name all content of the weights.

        Returns:
            How many pages of other weights, or of nobody knows which, it had.
        """
        return 0

    @property
    def opens(self) -> bool:
        """Whether `open_for` would wait."""
        return False

    def open_for(self, weights: bytes) -> None:
        """It may be used from now on, by an engine with these weights. Never waits: what has not forgotten the others
        by now is taken out.

        Args:
            weights: as for `begin_open`.
        """
        self.held = ""

    @property
    def unflushed(self) -> bool:
        """Whether further polls are wanted to make something durable. Costs next to nothing."""
        return False

    def durable(self) -> bool:
        """Whether all that was written until now would survive a crash; takes news first."""
        return True

    def close(self, deadline_s: float) -> bool:
        """Makes what was written durable. False: not all of it."""
        return True

    def room_of(self, group: int) -> TierRoom | None:
        """What it has room for now; None of a tier that nobody sizes."""
        return None

    def gauges(self) -> Mapping[str, float]:
        """Values of the metrics that only this tier has, by name."""
        return {}

    def totals(self) -> Mapping[Series, int]:
        """Running totals that only this tier has, by the series of a metric."""
        return {}

    def check_integrity(self, pinned: Sequence[EntryIds]) -> None:
        """
        Args:
            pinned: entries that leases and ops pin, each once.

        Raises:
            ContractError: an invariant is broken.
        """
        everything = np.concatenate(pinned) if pinned else np.empty(0, np.uint32)
        self.presence.check_integrity(everything)
