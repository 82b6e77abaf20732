"""The contract of a tier: one kind of storage that holds pages.

Host memory is the hub, the tier with number 0. Pages of every other tier are fetched to host memory and written from
it. A tier has a facet for each of its abilities. A `Source` fills host slots. A `Sink` writes pages from host slots. A
`Prober` must be asked which pages it has. A `Follower` has pages that other units add and remove. A `Keeper` has pages
that this unit need not keep itself. Routes move pages straight between the tier and engine blocks.

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
"""The logged reason when a reset takes a tier out of use because several units share the tier's pages."""

Series = tuple[str, tuple[tuple[str, str], ...]]
"""One series of a metric: the metric's name, and its labels with their values."""


class WriteMode(Enum):
    """When a page of host memory is written to a tier."""

    THROUGH = "through"
    """A page is written as soon as it is in host memory. The tier gets all pages, which takes the most writes."""
    BACK = "back"
    """A page is written when the tier is idle, at the latest before the page is evicted from host memory."""
    EVICT = "evict"
    """A page is written before it is evicted from host memory. Fewer writes than with BACK, but a crash loses all pages
    in memory."""
    REUSE = "reuse"
    """A page is written when it is used again from host memory, because it may then be used once more."""
    OFF = "off"
    """Pages are not written from host memory to the tier."""


@dataclass(frozen=True, slots=True)
class TierFacts:
    """Facts about a tier that the manager needs.

    Attributes:
        name: name of the tier in settings, metrics and the log.
        wait_s: seconds for which a request waits for this tier before it continues without the tier's pages.
        streams: whether a lookup may promise pages that are still being fetched. The engine must then compute the pages
            whose fetch fails, and the tier's data plane must mark each page in the host pool as arrived or failed
            before the fetch ends.
        stream_layers: whether a streamed fetch brings one range of layers of all its pages, then the next range, and so
            on.
        fetch_pages: maximum number of pages being fetched; a longer hit is cut.
        fetch_ops: maximum number of fetches in flight; also the maximum number of writes in flight.
        write: when pages of host memory are written to this tier.
        write_pages: maximum number of pages being written; further pages wait.
        waiting_pages: maximum number of pages that wait for their write; further pages are dropped and counted.
        write_at_close: whether closing the unit writes the pages that are only in host memory.
        copies_unchecked: whether pages are written without being verified. If a load finds a page damaged in host
            memory, this tier may then have the damaged page too.
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
        """Raises ConfigError if a limit is not positive; the message names it."""
        for name in ("wait_s", "fetch_pages", "fetch_ops", "write_pages", "waiting_pages"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{self.name} tier: {name}={getattr(self, name)}; allowed are values above 0"
                )


@dataclass(slots=True)
class TierCounts:
    """Running totals of one tier, as numbers of pages, requests, lookups or blocks.

    Attributes:
        written: pages whose write succeeded.
        failed_writes: pages whose write failed.
        dropped_writes: pages that were not written because the queue or the tier was full.
        down_writes: pages that were not written because the tier was down.
        lost: pages that were evicted from host memory, or given up at the unit's end, before they were written.
        read: pages that were fetched to host memory and verified.
        failed_reads: pages that a fetch or straight load did not bring because the tier failed, or that failed
            verification: damaged, torn, or from another write.
        unread: pages whose read failed through no fault of the page or the tier, and pages whose read was in flight
            when the cache was reset.
        expired: pages that were found after the end of their time to live.
        evicted: pages that were evicted to give their slots in the tier to other pages.
        gone: pages that were lost with a disk or folder.
        waits: requests that waited for the tier.
        prefetched: pages whose fetch was begun before a lookup asked for them.
        late: lookups that continued without the tier because it took too long.
        left: lookups that left pages of the tier to the engine, which computes them sooner than the tier brings them.
        left_pages: pages that lookups left to the engine, which computes them sooner than the tier brings them.
        no_room: requests that continued without some of the tier's pages because host slots or fetches ran short.
        no_room_pages: pages without which requests continued because host slots or fetches ran short.
        gds_read: pages that were loaded and verified without passing through host memory.
        gds_written: pages that were written without passing through host memory; also counted in `written`.
        hits: blocks that the tier supplied and that engines loaded.
    """

    written: int = 0
    failed_writes: int = 0
    dropped_writes: int = 0
    down_writes: int = 0
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
    """The size of a tier, to be shown to users.

    Attributes:
        pages: number of pages that the tier can hold in all.
        setting: name of the setting that determines the size.
        shares: number by which the setting's bytes are multiplied, such as the number of disks in use.
        more: text about the tier to append to the message.
    """

    pages: int
    setting: str
    shares: int
    more: str


class Plane(Protocol):
    """Runs a tier's ops, and reports one result per op after the op's last byte has stopped moving."""

    def submit(self, graph: TransferGraph) -> int | None:
        """Queues the graph's ops. Returns None if the queue is full; the caller then ends the ops as not executed."""

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
        """Plans an op that fetches pages to host slots. Its tags say which page each slot must contain afterwards.

        Args:
            entries: the tier's entry of each key, leased by the lookup; the op takes over the leases.
            places: the tier's slot of each entry.
            layerwise: whether to fetch ranges of layers one after the other, if the tier can do so.
        """

    @abstractmethod
    def end_fetch(self, plan: TransferOp, entries: EntryIds, suspect: NDArray[np.bool_]) -> None:
        """Unpins a fetch's entries, and forgets the pages marked in `suspect`, which the tier may not have intact.

        Call order:
            Once per planned fetch, after its last byte has stopped moving.
        """

    @abstractmethod
    def tokens_of(self, plan: TransferOp) -> NDArray[np.integer] | None:
        """Returns the number of valid tokens of each page of a fetch; None if the tier has only whole blocks."""

    def expiries_of(self, plan: TransferOp) -> Expiries | None:
        """Returns when each page of a fetch expires in host memory; None if none of the tier's pages does."""
        return None

    def expiries_there(self, group: int, keys: Keys) -> Expiries | None:
        """Returns when the tier's page of each key expires; NEVER if the tier lacks the page. None if no page of the
        tier expires."""
        return None


class Prober(ABC):
    """A tier that must be asked which pages it has. When a question has ended, the pages that the tier has are in
    `presence`.

    Attributes:
        probe_s: seconds for which a request waits for an answer before it continues without the tier.
    """

    probe_s: float

    @abstractmethod
    def ask(self, op_id: OpId, asked: Sequence[Keys], tokens: NDArray[np.int32] | None = None) -> bool:
        """Asks the tier which of these pages it has. Returns False if no question is sent; pages that are not in
        `presence` are then misses.

        Args:
            op_id: op number of the question.
            asked: per group, keys in the order of the request. For a FULL group, the answer may end at the first page
                that the tier lacks.
            tokens: number of valid tokens of each page, the same in every group; None for whole blocks.
        """

    @abstractmethod
    def answers(self) -> list[OpId]:
        """Adds to `presence` the pages in the answers that have arrived. Returns the op numbers of the questions that
        have ended since the last call.
        """


class Sink(ABC):
    """A tier to which pages are written from host slots.

    Attributes:
        keeps_times: whether the tier keeps the expiry times of pages. If not, pages that expire are not written to it.
    """

    keeps_times: bool = False

    @abstractmethod
    def known(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of the keys are in the tier or being written to it, bool [keys]."""

    @abstractmethod
    def plan_write(
        self, op_id: OpId, group: int, keys: Keys, slots: SlotIds, tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.integer], EntryIds, TransferOp | None]:
        """Gives slots in the tier to pages, evicting others by the tier's policy, and plans the op that writes the
        pages. Evictions are recorded before the slots are written.

        Args:
            slots: the host slot of each key.
            tokens: number of valid tokens of each page.

        Returns:
            Positions of the keys that got a slot, their entries (pinned until `end_write`), and the op (None if no key
            got a slot).
        """

    @abstractmethod
    def end_write(self, group: int, entries: EntryIds, good: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Makes the pages marked in `good` visible, frees the slots of all other pages, and unpins all pages. Returns
        which pages became visible, bool [entries].

        Call order:
            Once for the entries of each `plan_write`, after the op's last byte has stopped moving.
        """

    @abstractmethod
    def used(self, group: int, keys: Keys) -> None:
        """Marks the tier's copies of pages as used, because the pages were used from host memory."""

    @abstractmethod
    def room(self, group: int) -> int:
        """Returns the maximum number of pages of the group that the tier can hold, including those that it has."""


class Follower(ABC):
    """A tier whose pages other units add and remove. Its `presence` is updated from time to time."""

    @abstractmethod
    def take_news(self, group: int, keys: Keys) -> None:
        """Updates `presence` with the changes of these pages since the last call. Changes of other pages wait for
        `poll`. Takes microseconds if nothing has changed.
        """


class Keeper(ABC):
    """A tier of pages that peers keep in host memory, so that this unit need not keep them too (`peers.store: once`).

    The unit *leaves out* a page that a peer keeps: it does not store the page, and drops its copy after the load that
    needed it. When no peer keeps a page any more, the unit's copy is *promoted*: it becomes the unit's own page. After
    a peer's process has ended, the pages in its memory can be copied for a while. `orphans` returns those that this
    unit left out.
    """

    @abstractmethod
    def kept(self, group: int, keys: Keys, expiry: int | None = None) -> NDArray[np.bool_]:
        """Returns which of the keys a running peer keeps, as far as this unit knows, bool [keys].

        Args:
            expiry: only pages that expire at this Unix time in seconds or later count; with NEVER, only pages that do
                not expire; with None, all pages.
        """

    @abstractmethod
    def leave_out(self, group: int, keys: Keys) -> None:
        """Records that the unit leaves out these pages, and counts those that it did not leave out before.

        Call order:
            Only for pages that are `kept`, and before the next `take_news` of these pages.
        """

    @abstractmethod
    def take_back(self, group: int, keys: Keys) -> None:
        """Removes the records of `leave_out` for these pages, because the unit has them in its own host memory or does
        not need them any more.
        """

    @abstractmethod
    def promoted(self, pages: int) -> None:
        """Counts copies that became the unit's own pages."""

    @property
    @abstractmethod
    def has_orphans(self) -> bool:
        """Whether pages of an ended peer can still be copied. Calling it costs almost nothing."""

    @abstractmethod
    def orphans(self, most: int) -> tuple[int, Keys]:
        """Returns a group and up to `most` keys of its orphans, and removes these keys from the list of orphans. This
        unit should copy their pages: it left them out, and no running peer keeps them. Looks at no more than `most`
        records.

        Call order:
            Followed by `put_back` for keys whose copy could not begin, and by `end_orphans` when no copy is in flight.
        """

    @abstractmethod
    def put_back(self, group: int, keys: Keys) -> None:
        """Makes `orphans` return these keys again later."""

    @abstractmethod
    def end_orphans(self) -> None:
        """Releases the memory of ended peers if no page in it is needed any more; another thread then unmaps it."""


class Tier(ABC):
    """One kind of storage that holds pages.

    Attributes:
        facts: names and limits; see `TierFacts`.
        presence: index of the tier's pages by key.
        down: why the tier cannot be used; empty if it can. While it is down, its pages are misses and nothing is
            written.
        held: why the tier may not be used yet; empty if it may. While it is held, its pages are misses and writes wait.
        source, sink, prober, follower, keeper, loads, stores: the tier's facets; each is None if the tier lacks it.
            `loads` plans loads from the tier to engine blocks, `stores` plans stores from engine blocks to the tier.
        straight: the same object as `loads`, but None for the hub, whose loads come from host slots.
        plane: runs the tier's own ops; None if it has none or the caller runs them.
        durable_pages: number of pages written so far that would survive a crash.
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
        """Returns the entries of the leading keys that the tier has and may serve, uint32. May remove pages that it
        finds expired."""

    @abstractmethod
    def present(self, group: int, keys: Keys) -> NDArray[np.bool_]:
        """Returns which of the keys the tier has and may serve, bool [keys]. May remove pages that it finds expired."""

    @abstractmethod
    def forget(self, group: int, keys: Keys) -> int:
        """Makes these keys misses and frees their slots. A pinned slot is freed when its last pin ends. Returns how
        many of the keys were known."""

    @abstractmethod
    def begin_reset(self) -> None:
        """Makes all pages misses at once, and keeps pages in flight from becoming visible. Never waits."""

    @property
    def resets(self) -> bool:
        """Whether `finish_reset` would wait. Reading this property never waits."""
        return False

    @abstractmethod
    def finish_reset(self, ends_s: float) -> None:
        """Waits until no page from before the reset can be served, even after a crash. Parts of the tier that have not
        finished by `ends_s`, a time on the monotonic clock, are taken out of use.

        Call order:
            After `begin_reset`.
        """

    @abstractmethod
    def poll(self, now_s: float) -> None:
        """Updates the tier with events of its storage: lost disks, pages that became durable, a remote store that does
        not answer. Called a few times per second."""

    def go_down(self, reason: str) -> None:
        """Takes the tier out of use and logs the reason. Does nothing if the tier is already down."""
        if not self.down:
            logger.error("the %s tier is off: %s", self.facts.name, reason)
            self.down = reason

    @property
    def in_use(self) -> bool:
        """Whether the tier may be read and written now."""
        return not self.down and not self.held

    def hold(self, reason: str) -> None:
        """Keeps the tier from being used until `open_for`.

        Call order:
            Before the tier's first use.
        """
        self.held = reason

    def begin_open(self, weights: bytes) -> int:
        """Begins to remove, permanently, pages that were computed with other or unknown weights. Never waits.

        Call order:
            After `hold`. Then `open_for`, when `opens` is False or the caller does not want to wait any longer.

        Args:
            weights: 32 bytes that identify the complete content of the weights.

        Returns:
            The number of pages that are removed.
        """
        return 0

    @property
    def opens(self) -> bool:
        """Whether pages are still being removed since `begin_open`. `open_for` would then take parts of the tier out of
        use."""
        return False

    def open_for(self, weights: bytes) -> None:
        """Lets an engine with these weights use the tier from now on. Never waits: parts of the tier that still have
        pages of other weights are taken out of use.

        Args:
            weights: 32 bytes that identify the complete content of the weights.
        """
        self.held = ""

    @property
    def unflushed(self) -> bool:
        """Whether further calls of `poll` are needed to make pages durable. Calling it costs almost nothing."""
        return False

    def durable(self) -> bool:
        """Updates the tier like `poll`, and returns whether all pages written so far would survive a crash."""
        return True

    def close(self, deadline_s: float) -> bool:
        """Makes the written pages durable and closes the tier. Returns whether all of them are durable."""
        return True

    def room_of(self, group: int) -> TierRoom | None:
        """Returns the size of the tier now; None for a tier whose size no setting determines."""
        return None

    def gauges(self) -> Mapping[str, float]:
        """Returns the current values of the gauges that only this tier has, by the metric's name."""
        return {}

    def totals(self) -> Mapping[Series, int]:
        """Returns the running totals that only this tier has, by the series of a metric."""
        return {}

    def check_integrity(self, pinned: Sequence[EntryIds]) -> None:
        """Checks the tier's index.

        Args:
            pinned: entries that leases and ops have pinned, each as often as it is pinned.

        Raises:
            ContractError: an invariant is broken.
        """
        everything = np.concatenate(pinned) if pinned else np.empty(0, np.uint32)
        self.presence.check_integrity(everything)
