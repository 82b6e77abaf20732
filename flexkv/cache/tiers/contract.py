"""The contract of a tier: one kind of storage that holds pages.

Host memory is the hub: the tier with number 0, which every other tier reads into and is written from. A tier's facets
say what it can do: a `Source` fills host slots, a `Sink` takes pages from them, a `Prober` must be asked for its pages,
a `Follower` is notified of them, a `Keeper` has pages that this unit need not keep, and routes move pages straight
between the tier and engine blocks. The manager knows tiers only by their number.

The manager's thread makes all calls. Only `finish_reset` and `close` may wait.
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
from flexkv.cache.ledger.page_times import Expiries
from flexkv.cache.tiers.routes import LoadRoute, StoreRoute, StraightLoads
from flexkv.errors import ConfigError
from flexkv.facts.keys import Keys
from flexkv.observe import get_logger
from flexkv.transfer.graph import OpId, OpResult, SlotIds, TransferGraph, TransferOp

logger = get_logger(__name__)


NAMELESS = (
    "the cache was reset, for new weights or a sleep, and nothing names what the engine computes from now on until it "
    "starts again"
)
"""Why a reset takes a tier that other units read out of use."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a metric, and its labels with their values."""


class WriteMode(Enum):
    """When a page of host memory is written to a tier."""

    THROUGH = "through"
    """As soon as it is in host memory: the tier has everything, at the price of the most writes."""
    BACK = "back"
    """When the tier has nothing else to do, and before the page leaves host memory."""
    EVICT = "evict"
    """Only when it is about to leave host memory: the fewest writes, but a crash loses the pages in host memory."""
    REUSE = "reuse"
    """When an engine has loaded it from host memory: a page used once more may be used again."""
    OFF = "off"
    """Pages are not written here from host memory."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Facts about a tier that the manager needs. Counts are in pages unless they say otherwise.

    Attributes:
        name: appears in settings, metrics and the log.
        wait_s: seconds that a request waits for this tier before it continues without it.
        streams: pages under way to host memory may be promised to an engine that computes the pages that a load did not
            bring. The plane marks each page as arrived or failed in the pool's words before its op ends.
        stream_layers: streamed fetches bring ranges of layers of all their pages, one range after the other.
        fetch_pages: most pages under way to host memory; a longer hit is cut to fit.
        fetch_ops: most fetches in flight, and most writes in flight.
        write: when pages of host memory are written to this tier.
        write_pages: most pages with a write in flight; further ones wait.
        waiting_pages: most pages that wait for their write; further ones are dropped and counted.
        write_at_close: a close writes the pages that only host memory has.
        copies_unchecked: pages are written unverified. If a load finds one damaged in host memory, this tier may have
            the damage too.
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
        """The tier's label in metrics: the first word of its name."""
        return self.name.split()[0]

    def check(self) -> None:
        """
        Raises:
            ConfigError: a bound is not positive; the message names it.
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
        written: pages whose write succeeded.
        failed_writes: pages whose write failed.
        dropped_writes: pages never written, because a queue or the tier was full.
        lost: pages that left host memory before they were written.
        read: pages brought to host memory and verified.
        failed_reads: pages that were not brought or not verified: damaged, torn, of another write, or the tier failed.
        unread: pages whose fetch was planned but never begun, without a fault of the pages or the tier, or was
            overtaken by a reset.
        expired: pages found past their time to live.
        evicted: pages that left the tier to make room.
        gone: pages lost with a volume.
        waits: lookups that waited for the tier.
        prefetched: pages whose fetch was begun before a lookup asked for them.
        late: lookups that continued without the tier, because it took too long.
        left: lookups that left pages to the engine, because it computes them sooner.
        left_pages: pages that those lookups left.
        no_room: lookups that continued without some of the tier's pages, because no host slot or no place among the
            reads in flight became free in time.
        no_room_pages: pages without which those lookups continued.
        gds_read: pages loaded and verified without passing through host memory.
        gds_written: pages written without passing through host memory; `written` includes them.
        hits: blocks supplied by the tier that an engine took.
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
    """How many pages a tier has room for, as shown to people.

    Attributes:
        pages: pages in all.
        setting: name of the setting that sizes the tier.
        shares: how often the setting's bytes count, such as the number of disks in use.
        more: further text about the tier, to be appended.
    """

    pages: int
    setting: str
    shares: int
    more: str


class Plane(Protocol):
    """Moves the pages of a tier's ops. Reports one result per op, after the op's last byte has stopped moving."""

    def submit(self, graph: TransferGraph) -> int | None:
        """Queues the graph's ops. None when the queue is full: the ops end as not executed."""

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
        """Plans an op that brings pages to host slots; its tags say what each slot must hold.

        Args:
            entries: entry of each key, leased by the lookup; the op takes the leases over.
            places: place of each entry.
            layerwise: bring ranges of layers one after the other, if the tier can.
        """

    @abstractmethod
    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        """Unpins a fetch's entries and forgets those marked in `suspect`, whose pages were not the requested ones.

        Call order:
            Once per planned fetch, after its last byte has stopped moving.
        """

    @abstractmethod
    def tokens_of(self, plan: TransferOp) -> NDArray[np.integer] | None:
        """Valid tokens of each page of a fetch; None if all of the tier's pages are whole blocks."""

    def expiries_of(self, plan: TransferOp) -> Expiries | None:
        """When each page of a fetch expires; None if none of the tier's pages does."""
        return None

    def expiries_there(self, group: int, keys: Keys) -> Expiries | None:
        """When each of the keys' pages expires, NEVER for those that the tier lacks; None if none of its pages does."""
        return None


class Prober(ABC):
    """A tier that must be asked which pages it has. Its answers are in its `presence` when the question has ended.

    Attributes:
        probe_s: seconds that a request waits for an answer before it continues without the tier.
    """

    probe_s: float

    @abstractmethod
    def ask(self, op_id: OpId, asked: Sequence[Keys], tokens: NDArray[np.int32] | None = None) -> bool:
        """Asks the tier which of these pages it has. False: it asked nothing, and pages that `presence` does not have
        are misses.

        Args:
            op_id: number of the question.
            asked: per group, keys in the order of the request. For a group that restores whole prefixes, the answer may
                end with the first page that the tier lacks.
            tokens: valid tokens of each page, equal in every group; None for whole blocks.
        """

    @abstractmethod
    def answers(self) -> list[OpId]:
        """Adds the answers that have arrived to `presence`, and returns the questions that have ended since the last
        call.
        """


class Sink(ABC):
    """A tier that takes pages from host slots.

    Attributes:
        keeps_times: the tier takes pages that expire, and keeps their expiry times. If not, such pages are not written
            to it.
    """

    keeps_times: bool = False

    @abstractmethod
    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys are in the tier or being written to it, bool [keys]."""

    @abstractmethod
    def plan_write(
        self, op_id: OpId, group: int, keys: Keys, slots: SlotIds, tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer], EntryIds, TransferOp | None]:
        """Gives pages a place, evicting others by the tier's policy, and plans the op that writes them. Evicted pages
        are recorded as gone before their places are written.

        Returns:
            Positions in `keys` of those that got a place, their entries (pinned until `end_write`), and the op.
        """

    @abstractmethod
    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Makes the pages marked in `good` visible, frees the places of the others, and unpins all. Returns which pages
        became visible.

        Call order:
            Once for the entries of each `plan_write`, after the last byte has stopped moving.
        """

    @abstractmethod
    def used(self, group: int, keys: Keys) -> None:
        """Counts pages that were used from host memory as used in this tier too."""

    @abstractmethod
    def room(self, group: int) -> int:
        """Most pages of the group that the tier can hold now."""


class Follower(ABC):
    """A tier whose pages come and go through other units, and whose `presence` is updated from time to time."""

    @abstractmethod
    def take_news(self, group: int, keys: Keys) -> None:
        """Updates `presence` with the news of these pages since the last call; other news waits for `poll`. Costs
        microseconds if there is no news.
        """


class Keeper(ABC):
    """A tier of pages that other units keep in host memory, so that this unit need not keep them too (`peers.store:
    once`).

    The unit *leaves out* a page that is kept: it does not store it, and drops its copy after the load that needed it.
    When no peer keeps a page any more, the unit's copy is *promoted*: it becomes the unit's own page. Once a keeper's
    process has ended, the pages in its memory can be copied for a while, and `orphans` names those that this unit left
    out.
    """

    @abstractmethod
    def kept(self, group: int, keys: Keys, expiry: int | None = None) -> NDArray[np.bool_]:
        """Which of the keys a running peer keeps, as far as this unit knows, bool [keys].

        Args:
            expiry: pages that expire earlier do not count, in Unix seconds; with NEVER only pages that do not expire
                count, with None all.
        """

    @abstractmethod
    def leave_out(self, group: int, keys: Keys) -> None:
        """Records that the unit leaves these pages out, and counts those for which there was no record.

        Call order:
            For pages that are `kept`, before `take_news` of them.
        """

    @abstractmethod
    def take_back(self, group: int, keys: Keys) -> None:
        """Removes the records of `leave_out`: the unit has these pages in its own host memory, or they are no longer
        needed.
        """

    @abstractmethod
    def promoted(self, pages: int) -> None:
        """Counts pages whose copies became the unit's own."""

    @property
    @abstractmethod
    def has_orphans(self) -> bool:
        """Whether pages of an ended keeper can still be copied. The cost is negligible."""

    @abstractmethod
    def orphans(self, most: int) -> tuple[int, Keys]:
        """Takes up to `most` keys, all of one group, of pages that the unit left out, that no running peer keeps, and
        that this unit should copy. Looks at no more than `most` records. Returns the group and the keys.

        Call order:
            `put_back` for those whose copy could not begin; `end_orphans` once no copy is under way.
        """

    @abstractmethod
    def put_back(self, group: int, keys: Keys) -> None:
        """Makes `orphans` name these keys again."""

    @abstractmethod
    def end_orphans(self) -> None:
        """Releases the memory of ended keepers, if no page in it is needed any more. Another thread then unmaps it."""


class Tier(ABC):
    """One kind of storage that holds pages.

    Attributes:
        facts: see `TierFacts`.
        presence: index of the keys of its pages.
        down: why the tier cannot be used; empty while it can. While it is down, its pages are misses and nothing is
            written.
        held: why the tier may not be used yet; empty once it may. Until then its pages are misses, and writes wait.
        source, sink, prober, follower, keeper, loads, stores: its facets; None for those that it lacks. `loads` move
            its pages to engine blocks, `stores` move pages from there.
        straight: the same as `loads` for tiers other than the hub; None for the hub.
        plane: moves the pages of its own ops; None if it has no such ops or the caller moves them.
        durable_pages: pages written so far that would survive a crash.
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
    follower: Follower | None = None
    keeper: Keeper | None = None
    loads: LoadRoute | None = None
    straight: StraightLoads | None = None
    stores: StoreRoute | None = None
    plane: Plane | None = None

    @abstractmethod
    def leading(self, group: int, keys: Keys) -> EntryIds:
        """Entries of the leading keys that the tier has and may serve, uint32. May remove pages that it finds
        expired."""

    @abstractmethod
    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Which of the keys the tier has and may serve, bool [keys]. May remove pages that it finds expired
        (`BlockIndex.set_expiry`)."""

    @abstractmethod
    def forget(self, group: int, keys: Keys) -> int:
        """Makes these keys misses; pinned pages leave with their last pin. Returns how many were known."""

    @abstractmethod
    def begin_reset(self) -> None:
        """Makes every page a miss at once; pages in flight will not become visible. Never waits."""

    @property
    def resets(self) -> bool:
        """Whether `finish_reset` would wait. Never waits itself."""
        return False

    @abstractmethod
    def finish_reset(self, ends_s: float) -> None:
        """Waits until nothing older is served, not even after a crash. Parts that cannot confirm this by `ends_s`, on
        the monotonic clock, are taken out of use.

        Call order:
            After `begin_reset`.
        """

    @abstractmethod
    def poll(self, now_s: float) -> None:
        """Takes news from the storage below: lost volumes, durable pages, whether it can be reached. Called a few times
        per second."""

    def go_down(self, reason: str) -> None:
        """Takes the tier out of use and logs why, unless it is down already."""
        if not self.down:
            logger.error("the %s tier is off: %s", self.facts.name, reason)
            self.down = reason

    @property
    def in_use(self) -> bool:
        """Whether the tier may be asked and written to now."""
        return not self.down and not self.held

    def hold(self, reason: str) -> None:
        """Keeps the tier from being used before `open_for`.

        Call order:
            Before the tier's first use.
        """
        self.held = reason

    def begin_open(self, weights: bytes) -> int:
        """Begins to forget permanently the pages that were computed with weights other than these. Never waits.

        Call order:
            After `hold`; then `open_for`, once `opens` is False or the caller waits no longer.

        Args:
            weights: 32 bytes that name all content of the weights.

        Returns:
            How many pages of other or unknown weights the tier had.
        """
        return 0

    @property
    def opens(self) -> bool:
        """Whether `begin_open` is still forgetting pages, so that `open_for` would take parts of the tier out of
        use."""
        return False

    def open_for(self, weights: bytes) -> None:
        """Lets an engine with these weights use the tier from now on. Never waits: parts that have not forgotten the
        pages of other weights by now are taken out of use.

        Args:
            weights: as for `begin_open`.
        """
        self.held = ""

    @property
    def unflushed(self) -> bool:
        """Whether further calls of `poll` are needed to make pages durable. The cost is negligible."""
        return False

    def durable(self) -> bool:
        """Takes news as `poll` does, then returns whether all pages written so far would survive a crash."""
        return True

    def close(self, deadline_s: float) -> bool:
        """Makes the written pages durable and closes the tier; False if not all of them are durable."""
        return True

    def room_of(self, group: int) -> TierRoom | None:
        """How many pages the tier has room for now; None for a tier without a size setting."""
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
