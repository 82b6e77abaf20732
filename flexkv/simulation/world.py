"""The state that all parts of a simulation use: the manager, its model, the engine, and the ops in flight."""

from __future__ import annotations

import hashlib
import random
from collections import deque

from flexkv.cache.base import ManagerLimits, OpRole, TierId, sharing
from flexkv.cache.tiers.contract import TierFacts
from flexkv.cache.tiers.disk.load_route import GdsUse
from flexkv.cache.tiers.disk.tier import DiskTier, DiskTraffic
from flexkv.cache.tiers.factory import unit_tiers
from flexkv.cache.tiers.remote.tier import RemoteTier
from flexkv.cache.tiers.tables import TierContext
from flexkv.facts.keys import Keys
from flexkv.simulation.base import NO_SLOT, Key, ManagerFactory, SimulationConfig, SimulationReport, require
from flexkv.simulation.disk_lane import SimDiskLane
from flexkv.simulation.engine import SimEngine
from flexkv.simulation.line_model import LineModel
from flexkv.simulation.model import Model
from flexkv.simulation.model_ops import ModelOp
from flexkv.simulation.recorder import Recorder
from flexkv.simulation.request import SimRequest
from flexkv.simulation.symbolic_store import SymbolicStore
from flexkv.simulation.symbolic_tier import SymbolicTier
from flexkv.simulation.symbolic_volumes import SymbolicVolumes
from flexkv.transfer.graph import NEVER, WITHOUT_SLOTS, OpKind, TransferOp

RETIRED = 64
"""Number of block tables that are kept after their requests have lost the blocks. A load finishes long before this many
requests lose their blocks."""


FETCH_PAGES = 12
"""Maximum number of pages that are being read from one tier."""

FETCH_OPS = 4
"""Maximum number of reads from disk in flight."""

BEGUN_S = 1_000_000
"""Wall-clock time at which a run begins, in Unix seconds."""

DISK = TierId(1)
"""The disk tier, if there is one."""


def block_key(*parts: object) -> bytes:
    """Returns a key of 16 bytes, which depends only on the parts."""
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def host_slots(op: TransferOp) -> list[int]:
    """Returns the host slot of each page of an op; NO_SLOT for each if the op does not use host memory."""
    return [NO_SLOT] * op.pages if op.kind in WITHOUT_SLOTS else op.slots.tolist()


class World:
    """The state of one run, and methods that several parts of the simulation use."""

    def __init__(self, config: SimulationConfig, manager_class: ManagerFactory) -> None:
        self.config = config
        self.random = random.Random(config.seed)
        self.now_s = 0.0
        self.recorder = Recorder()
        limits = ManagerLimits(
            ranks=config.ranks,
            inflight_store_pages=config.store_queue_pages,
            inflight_load_pages=config.load_queue_pages,
            lease_s=30.0,
            prefetch_requests=3,
            asks_again=config.asks_again,
        )
        self.store = SymbolicStore()
        self.disk = SymbolicVolumes([config.disk_places] * len(config.groups), config.disks)
        gds_use = GdsUse.WHERE_FASTER if config.measured_steps else GdsUse.ALWAYS
        facts = TierFacts(
            "disk",
            wait_s=config.wait_s,
            write=config.disk_mode,
            write_pages=6,
            fetch_pages=FETCH_PAGES,
            waiting_pages=8,
            fetch_ops=FETCH_OPS,
            streams=config.stream,
        )
        traffic = DiskTraffic(
            facts,
            gds_loads=gds_use if config.gds_loads else GdsUse.NEVER,
            gds_stores=config.gds_stores,
        )
        self.manager = manager_class(
            config.groups,
            limits,
            policy=config.policy,
            clock=lambda: self.now_s,
            listener=self.recorder,
            tiers=[
                *unit_tiers(self.disk if config.disk_places else None, traffic),
                *([self._symbolic_tier] if config.tier_places else []),
                *([self._remote_tier] if config.remote else []),
            ],
            unix_s=lambda: BEGUN_S + self.now_s,
        )
        self.model = Model(config.groups, config.step_tokens, limits)
        self.line = LineModel(self.model)
        if config.has_tiers:
            self.model.waiting_slots = self._waiting_slots
        slots = [spec.slots for spec in config.groups]
        owners = sharing(config.groups)
        self.engine = SimEngine(config.ranks, len(config.groups), config.engine_blocks, slots, owners)
        self.disk_lane = SimDiskLane(self.disk, self.engine.slot_content, self.engine.fill_slot)
        self.disk_ended: dict[int, TransferOp] = {}
        self.live: list[SimRequest] = []
        self.retired: deque[tuple[str, list[list[int]]]] = deque(maxlen=RETIRED)
        """Request id and block table of each of the last RETIRED requests that have lost their blocks. A load into one
        of these blocks may still fail."""
        self.ops: dict[int, TransferOp] = {}
        self.report = SimulationReport()
        self.lost_until = 0
        self._stored_at: dict[Key, int] = {}
        """Key of a page that expires -> time of the page's last store, in Unix seconds."""
        for group in range(len(config.groups)):
            self.grow(group)

    def _waiting_slots(self, group: int) -> set[int]:
        """Returns the host slots whose pages were fetched for requests whose lookup was not repeated yet."""
        return self.manager.held_slots(group)

    def _symbolic_tier(self, context: TierContext) -> SymbolicTier:
        facts = TierFacts(
            "symbolic",
            write=self.config.disk_mode,
            write_pages=5,
            fetch_pages=FETCH_PAGES,
            waiting_pages=8,
            fetch_ops=3,
            copies_unchecked=False,
        )
        return SymbolicTier(context, self.config.tier_places, facts)

    def _remote_tier(self, context: TierContext) -> RemoteTier:
        facts = TierFacts(
            "remote",
            wait_s=2.0,
            write=self.config.disk_mode,
            write_pages=5,
            fetch_pages=FETCH_PAGES,
            waiting_pages=8,
            fetch_ops=3,
            write_at_close=False,
            copies_unchecked=False,
        )
        return RemoteTier(context, facts, probe_s=0.3, plane=self.store)

    @property
    def remote_tier(self) -> RemoteTier | None:
        """The manager's last tier if it is remote; otherwise None."""
        tier = self.manager.tiers[-1]
        return tier if isinstance(tier, RemoteTier) else None

    @property
    def symbolic_tier(self) -> SymbolicTier | None:
        """The manager's last tier if it is symbolic; otherwise None."""
        tier = self.manager.tiers[-1]
        return tier if isinstance(tier, SymbolicTier) else None

    @property
    def disk_tier(self) -> DiskTier:
        """The manager's disk tier, which uses the simulated disks `disk`."""
        tier = self.manager.tiers[DISK]
        assert isinstance(tier, DiskTier)
        return tier

    # --- times to live ---

    @property
    def unix_s(self) -> int:
        return int(BEGUN_S + self.now_s)

    def expire_pages(self) -> None:
        """Forgets expired pages in the model. Must be called before each call of the manager that drops expired
        pages."""
        if self.config.ttl_s:
            self.recorder.expiring |= self.model.expire(self.unix_s)

    def expiries_of(self, group: int, keys: Keys, ttl_s: int | None) -> list[int]:
        """Returns when pages expire whose store to host memory begins now, in Unix seconds. A page expires after
        `ttl_s` seconds, or when its copy on disk expires if that is earlier. NEVER for a page to which neither applies.
        """
        ends = self.unix_s + ttl_s if ttl_s else NEVER
        on_disk = self.disk_tier.expiries_there(group, keys) if self.config.disk_places else None
        if on_disk is None:
            return [ends] * len(keys)
        return [min((time for time in (ends, there) if time), default=NEVER) for there in on_disk.tolist()]

    def note_stored(self, pages: list[tuple[Key, int]]) -> None:
        """Records pages whose store begins now, and when they expire in host memory."""
        self.model.note_times(dict(pages))
        self._stored_at.update((key, self.unix_s) for key, expiry in pages if expiry)

    def is_over(self, key: Key) -> bool:
        """Returns whether every copy of a page has expired in all tiers. The time of the page's last store decides,
        because no copy is younger."""
        stored = self._stored_at.get(key)
        return stored is not None and self.unix_s >= stored + self.config.ttl_s

    # --- engine blocks ---

    def pick(self) -> SimRequest | None:
        return self.random.choice(self.live) if self.live else None

    def room_for(self, steps: int) -> bool:
        wanted = enumerate(self.config.pages_a_step)
        return all(len(self.engine.pool.free(g)) >= steps * pages for g, pages in wanted)

    def give_block(self, request: SimRequest, group: int, block: int, has: bool) -> None:
        self.engine.pool.hold((group, block))
        request.blocks[group].append(block)
        request.has[group].append(has)

    def free_blocks(self, request: SimRequest) -> None:
        if request.blocks:
            self.retired.append((request.request_id, request.blocks))
        for group, blocks in enumerate(request.blocks):
            for block in blocks:
                self.engine.pool.drop((group, block))
        request.blocks, request.has = [], []
        request.unverified = set()

    def release(self, request: SimRequest) -> None:
        self.manager.release(request.request_id)
        self.model.release(request.request_id)
        self.line.leave(request.request_id)
        if self.random.random() < 0.2:
            self.manager.release(request.request_id)

    def end_request(self, request: SimRequest) -> None:
        self.manager.end_request(request.request_id)
        self.model.end_request(request.request_id)
        self.line.leave(request.request_id)

    def submit(
        self,
        op: TransferOp,
        request: SimRequest,
        role: OpRole,
        keys: list[Key],
        numbers: list[int],
        in_stream: bool,
        load: int = 0,
    ) -> None:
        """Submits an op to the ranks.

        Args:
            keys, numbers: key of each page of the op, and index of each page in the request.
            in_stream: whether the op runs in order with the engine's steps.
            load: id of the first op of the load to which the op belongs; 0 for a store.
        """
        waits = {
            number
            for number, other in self.model.ops.items()
            if role is OpRole.STORE and other.role is OpRole.LOAD and other.request_id == request.request_id
        }
        self.model.add_op(
            op.op_id,
            ModelOp(
                request.request_id, role, keys, host_slots(op), numbers, self.model.epoch, waits, load=load
            ),
        )
        self.ops[op.op_id] = op
        if op.kind in WITHOUT_SLOTS:
            self.disk_lane.submit_of_ranks(op)
        self.engine.enqueue(op, role is OpRole.LOAD, in_stream)

    def blocks_being_loaded(self, group: int) -> set[int]:
        """Returns the engine blocks that loads in flight write."""
        loads = (op for op_id, op in self.ops.items() if self.model.ops[op_id].role is OpRole.LOAD)
        return {block for op in loads if op.group == group for block in op.blocks.tolist()}

    def places_being_read(self, group: int) -> set[int]:
        """Returns the disk slots that ops in flight read, including ops that have finished but are not reported yet."""
        ops = (*self.disk_lane.ops.values(), *self.disk_lane.rank_ops.values(), *self.disk_ended.values())
        reads = (op for op in ops if op.group == group and op.kind in (OpKind.DISK_READ, OpKind.GDS_READ))
        return {place for op in reads for place in op.places.tolist()}

    def grow(self, group: int) -> None:
        slots = self.config.groups[group].slots
        up = min(slots, self.model.up[group] + max(1, slots // 3))
        for other in self.model.shares(group):
            self.model.up[other] = up
        self.manager.grow(group, up)

    def check_visible(self) -> None:
        """Checks that the slot of every visible page has the KV of its key on every rank."""
        for (group, key), slot in self.model.visible.items():
            for rank in self.engine.ranks:
                require(
                    rank.slot[group][slot] == (self.engine.weights, key),
                    "a visible slot holds another block's bytes",
                )
