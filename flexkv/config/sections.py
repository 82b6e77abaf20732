"""The settings, one frozen pydantic model per section. A field's description documents it and says why it exists.

The environment variable of a field is FLEXKV_<SECTION>_<FIELD>.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flexkv.config.values import (
    BeatSeconds,
    Count,
    CountOrNone,
    Folders,
    OptionalCount,
    OptionalFolder,
    OptionalNode,
    OptionalSeconds,
    OptionalSizeBytes,
    OptionalWholeSeconds,
    Seconds,
    Share,
    SizeBytes,
    Text,
    Urls,
    Words,
    auto_or_count,
    off_is_a_word,
    off_on_or_path,
    on_and_off_are_words,
)

IoBackend = Literal["auto", "uring", "threads"]
"""How files are read into plain memory and written from it; `auto` uses io_uring if the kernel allows it."""

MIB = 1 << 20
GIB = 1 << 30
SMALL_MACHINE_CPUS = 4
"""With this many CPUs or fewer, a second copy thread would take CPU time from the engine's own threads."""
MAX_VERIFY_THREADS = 16
"""More threads digest a piece of 8 MiB no faster, and the native core accepts no more."""
MIN_PREFETCH_LAYERS, MAX_PREFETCH_LAYERS = 2, 16
"""With two layers, one is filled while the other is used. More than sixteen hide no more latency than sixteen do."""


class Section(BaseModel):
    """Base of the models of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class HostConfig(Section):
    """Settings of the tier in host memory."""

    bytes: OptionalSizeBytes = Field(
        None,
        description="Host memory of one ownership unit (in vLLM: one data-parallel rank with all its tensor-parallel "
        "ranks). Unset: `memory_share` decides. Excludes `bytes_per_rank`.",
    )
    bytes_per_rank: OptionalSizeBytes = Field(
        None,
        description="The same, per rank: it is multiplied by the unit's ranks. For settings sized per worker. "
        "Excludes `bytes`.",
    )
    memory_share: Share = Field(
        0.5,
        description="Share of the memory free at start that all units of the node take together when no size is given; "
        "half leaves room for the engine's own weights loading and the page cache.",
    )
    units_per_node: Count = Field(
        1,
        le=1024,
        description="Ownership units that start on this node; each takes its part of `memory_share` and of "
        "`disk.space_share`. They cannot see each other at start, so someone has to say how many there are.",
    )
    extent_bytes: SizeBytes = Field(
        GIB,
        ge=2 * MIB,
        le=GIB,
        multiple_of=2 * MIB,
        description="The pool is mapped, pinned and bound to a NUMA node in extents of this size. Smaller ones "
        "are usable sooner; 1 GiB at most, which is what the kernel registers for I/O at once.",
    )
    huge_pages: Annotated[Literal["auto", "off"], BeforeValidator(off_is_a_word)] = Field(
        "auto",
        description="`auto` takes 2 MiB pages where the machine gives them and says what it got; `off` is for machines "
        "where compaction stalls are worse than slower copies.",
    )
    numa_node: OptionalNode = Field(
        None,
        description="NUMA node from which the pool's memory is taken as long as it has any; the node next to the GPU "
        "and the disks copies fastest. Unset: the kernel decides, as a rule for the node of the thread that touches "
        "the memory.",
    )
    verify: bool = Field(
        False,
        description="Make a digest of every stored page and check it at every load; a page that does not match is "
        "never used. This costs one more pass over the bytes. For machines whose memory is in doubt.",
    )
    verify_threads: Count = Field(
        4,
        le=MAX_VERIFY_THREADS,
        description="Threads per rank that make and check digests where a GPU copies, so that a link is not limited "
        "to what one core digests; loads go first, then stores. `1`: only the threads that move the pages. Without "
        "`verify` there are none.",
    )


class StoreConfig(Section):
    """Settings that decide which blocks are stored, and when."""

    mode: Literal["eager", "lazy", "layerwise"] = Field(
        "eager",
        description="`eager` stores a block as soon as its KV is certain, so that the next turn finds it and, with a "
        "disk, a restart does too, however the engine ends; `layerwise` does the same, but stores each layer while "
        "the forward computes the next (vLLM only; elsewhere it is `eager`); `lazy` stores what the engine is about "
        "to evict, which moves fewer bytes and loses what is in the engine when it stops.",
    )
    tokens: Literal["all", "prompt"] = Field(
        "all",
        description="`prompt` stores only prompt blocks; `all` also what was generated, which the next turn of a "
        "conversation asks for.",
    )
    generated_blocks: Count = Field(
        4,
        description="How many blocks a running request generates before `eager` and `layerwise` store them together "
        "(vLLM): a store costs the engine's step the same for one block as for many. What is left is stored at the "
        "request's end; a crash or a preemption loses it.",
    )
    partial_blocks: bool = Field(
        False,
        description="Also store the tail that fills no whole block. Saves less than one block of recompute "
        "per hit and costs one slot per request, so it pays for short prompts only.",
    )
    max_reference_share: Share = Field(
        0.25,
        description="Share of the engine's blocks that no request holds any more and that may have a store in flight: "
        "a lazy store, or one that is begun after its request's end. When the engine hands such a block out again, its "
        "next step waits a moment for the copy to end, so more of it makes steps wait. Blocks of full attention "
        "of live requests are stored without this bound.",
    )
    hold_s: Seconds = Field(
        2.0,
        description="How long after its request's end a block that found no room for its store still waits for room "
        "(vLLM). Such blocks stay free: the engine takes them whenever it needs them, and then they are not stored.",
    )
    checkpoint_tokens: OptionalCount = Field(
        None,
        description="With several KV groups (sliding windows, chunks, recurrent states): the distance in tokens "
        "between the places of a long prompt at which a hit may end, besides the prompt's end. Windows and states "
        "are stored at these places. A smaller distance costs more bytes and lets prompts that share a beginning hit "
        "more of it. Default: 8 windows, but at least 4096.",
    )
    inflight_pages: Count = Field(
        65_536,
        description="At most this many pages have a store in flight. A further page waits while its request lives "
        "and `store.hold_s` after that (vLLM), or is dropped and counted, because a cache must never make the engine "
        "wait.",
    )


class LoadConfig(Section):
    """Settings that decide how hits are loaded."""

    mode: Literal["async", "sync", "layerwise"] = Field(
        "async",
        description="`async` lets the engine run other requests while a hit loads; `sync` loads within the step, "
        "before its forward, and `layerwise` during it: the forward waits for each layer when it comes to it. These "
        "two have the lowest latency with one request at a time. In vLLM they need `--no-async-scheduling` and, on "
        "GPUs, `VLLM_USE_V2_MODEL_RUNNER=0`; otherwise its loads are async, and one warning says so.",
    )
    layer_hooks: Literal["auto", "trust"] = Field(
        "auto",
        description="With `load.mode` `layerwise` in TensorRT-LLM: `auto` lets a forward start before its loads have "
        "ended where the engine's arguments say that every forward calls the hooks of its layers; `trust` does so "
        "anyway, and a forward that does not call them ends with an error.",
    )
    deadline_s: Seconds = Field(
        30.0,
        description="A load that takes longer is given up and recomputed. Its blocks stay pinned until the last byte "
        "has stopped moving.",
    )
    lease_s: Seconds = Field(
        60.0,
        description="How long a lookup keeps its slots from eviction if the engine never follows it up.",
    )
    lookup_wait_s: Seconds = Field(
        1.0,
        description="How long a lookup waits for pages from disk or from the store that machines share, in an engine "
        "that cannot be asked to come back (SGLang's linker, TensorRT-LLM); what has not come by then is computed. "
        "The engine's other requests stand still meanwhile. In TensorRT-LLM all lookups between two steps together "
        "wait no longer than this.",
    )
    inflight_pages: Count = Field(
        65_536,
        description="At most this many pages are promised or loading; a longer hit is cut to what fits, because a "
        "promise must be kept.",
    )
    prefetch_layers: Count = Field(
        2,
        ge=MIN_PREFETCH_LAYERS,
        le=MAX_PREFETCH_LAYERS,
        description="Layers that blending holds at once: the one it works with and those that are loaded and turned "
        "ahead of it. Each takes the memory of one layer of the whole prompt, under vLLM of a step's part of it. More "
        "of them help if layers come unevenly.",
    )


class TransferConfig(Section):
    """Settings of the data plane."""

    queue_ops: Count = Field(
        1024,
        le=1 << 20,
        description="Operations that may wait in each lane. A further store waits while its request lives and "
        "`store.hold_s` after that (vLLM), or is dropped and counted.",
    )
    copy_threads: Annotated[Literal["auto"] | Count, BeforeValidator(auto_or_count)] = Field(
        "auto",
        description="Threads that copy where the engine's pool is plain memory. `auto`: 1, or 2 with more than 4 CPUs.",
    )
    batch_copies: bool = Field(
        True,
        description="Let a GPU's copy engine take copies in batches if its driver passes a test of them at start; "
        "off is for drivers that hang later on.",
    )
    copy_kernel: bool = Field(
        True,
        description="Let a kernel on one or two multiprocessors make a GPU's stores and load its short runs; off "
        "leaves all of them to the copy engine, which is slower for short runs. The kernel takes no multiprocessor "
        "from the model, but its stores slow an engine's steps more than the copy engine's do.",
    )
    ways_file: Text = Field(
        "",
        description="A file of `flexkv bench transfer --save`: which runs a GPU's kernel copies, as measured on this "
        "GPU, link, driver and version of flexkv. Another GPU goes by what is built in, as without the setting, and a "
        "warning says so.",
    )
    stuck_s: Seconds = Field(
        60.0,
        description="An operation in which nothing has moved for this long takes its lane down. Its slots stay out of "
        "use until it ends, because what is in flight cannot be recalled.",
    )
    close_s: Seconds = Field(
        10.0,
        description="How long a shutdown waits for operations in flight before it leaves them and says so.",
    )

    def copy_thread_count(self, cpus: int | None = None) -> int:
        """Returns `copy_threads`, or for `auto` the choice for `cpus` CPUs (None: all that this process may use)."""
        if self.copy_threads != "auto":
            return int(self.copy_threads)
        count = cpus if cpus is not None else len(os.sched_getaffinity(0))
        return 2 if count > SMALL_MACHINE_CPUS else 1


class DiskConfig(Section):
    """Settings of the tier on local disks."""

    folders: Folders = Field(
        (),
        description="Absolute paths joined by `:` or `,`, one per disk; blocks are striped over them, and a disk "
        "that fails is taken out. In YAML and the extra config also a list, which a folder with `:` or `,` in its name "
        "needs. Their names are UTF-8. Unset: no disk tier.",
    )
    bytes_per_folder: OptionalSizeBytes = Field(
        None,
        description="What one ownership unit fills in each folder. Unset: `space_share` decides.",
    )
    space_share: Share = Field(
        0.5,
        description="Share of each folder's file system that all units of the node take together when no size is "
        "given, of what is free or in the folder already; half leaves room for others. With 1 headers and index still "
        "have theirs.",
    )
    mode: Literal["through", "back", "evict"] = Field(
        "through",
        description="When a block is written: `through` as soon as it is in host memory; `back` when the disks are "
        "quiet, and before it leaves host memory; `evict` only then, which writes least and keeps least over a crash.",
    )
    ttl_s: OptionalWholeSeconds = Field(
        None,
        description="Blocks become misses this many seconds after they were written; for data that must not be kept "
        "longer.",
    )
    wait_s: Seconds = Field(
        30.0,
        description="How long a request waits for its blocks to be read from disk before it computes them: a slow "
        "disk must not hold a request forever. With vLLM a request first waits, for as long at most, for room in "
        "host memory if other requests hold the slots that the read needs.",
    )
    prefetch_requests: CountOrNone = Field(
        16,
        description="Requests in the engine's queue whose blocks are read from disk before the engine first asks for "
        "them; 0: reads begin when it asks. Their blocks take at most a quarter of host memory. With vLLM, and "
        "SGLang's linker.",
    )
    compute_if_faster: bool = Field(
        True,
        description="Let the engine compute blocks that are on disk if it does so sooner than the disk reads them, "
        "as both were measured lately; off is for engines whose time is worth more than a request's.",
    )
    stream: bool = Field(
        False,
        description="Promise blocks that are on disk as soon as their read is planned, and copy each to the engine "
        "when it has come and is verified (with `load.mode` layerwise, each of its layers), so that reading and "
        "loading overlap; a page that fails is computed. The request holds its engine blocks meanwhile, and with "
        "`load.mode` sync or layerwise the step stands still until what it needs next has come. Only with vLLM and "
        "`kv_load_failure_policy` recompute. Segments that are blended come by layers whatever `load.mode` and the "
        "policy are.",
    )
    gds: Annotated[Literal["off", "auto", "on"], BeforeValidator(on_and_off_are_words)] = Field(
        "auto",
        description="Load blocks that are on disk straight to the engine's pool, without a page of host memory. "
        "`auto`: where the ranks have GPUDirect Storage, and while that is measured to be faster than reading to host "
        "memory and copying (with `load.mode` async); `on`: always, also by io_uring or POSIX calls and a copy. For "
        "vLLM with `kv_load_failure_policy` recompute; for other engines see `disk.gds_may_fail_requests`.",
    )
    gds_may_fail_requests: bool = Field(
        False,
        description="`disk.gds` also for an engine that cannot compute what a load did not bring: SGLang, "
        "TensorRT-LLM, vLLM without `kv_load_failure_policy` recompute. Such a load is promised before it is read, "
        "so a page that then proves bad or cannot be read costs its request (with SGLang all of its forward, with "
        "TensorRT-LLM and `load.mode` sync or layerwise the step), and a read that hangs forever costs the engine; "
        "bytes that failed are never used. Needs `disk.gds` on.",
    )
    gds_stores: bool = Field(
        False,
        description="Store blocks from the engine's pool straight to disk, and not in host memory; for machines that "
        "are shorter of host memory than of disk bandwidth. Needs `disk.gds` on, `disk.mode` through and "
        "`store.mode` eager.",
    )
    write_pages: Count = Field(
        4096,
        description="At most this many pages are being written at once; each keeps its slot of host memory from "
        "eviction.",
    )
    io: IoBackend = Field(
        "auto",
        description="`auto` takes io_uring where the kernel allows it, else threads that read and write.",
    )
    depth: Count = Field(
        32,
        le=1024,
        description="Reads and writes under way at once on one disk; more would only queue in the device. Threads "
        "take 8 at most, and the log says so.",
    )
    register_buffers: bool = Field(
        False,
        description="io_uring keeps the whole host pool pinned, instead of pinning the pages of each read and write; "
        "the pool counts against the `memlock` limit, once per disk. docs/benchmarks.md says what this gains. If it "
        "is refused, I/O goes on without it and the log says why.",
    )
    stuck_s: Seconds = Field(
        30.0,
        description="A disk with a read or write that takes longer is taken out; the other disks go on.",
    )


class RemoteConfig(Section):
    """Settings of the tier in a store that machines share."""

    urls: Urls = Field(
        (),
        description="Where the store is: one `mooncake://HOST:PORT` (its master), or one or more "
        "`redis://HOST[:PORT][/DATABASE]` or `rediss://` (TLS), joined by commas; values are spread over several. "
        "Unset: no remote tier.",
    )
    user: Text = Field("", description="Redis: the name of an ACL user. Unset: the default user.")
    password_file: Text = Field(
        "",
        description="Redis: a file with the password, readable by its owner alone. Never shown anywhere.",
    )
    ca_file: Text = Field(
        "", description="Redis with TLS: the certificates by which servers are trusted. Unset: the system's."
    )
    trusted_network: bool = Field(
        False,
        description="The network to a store that sends plain text (`mooncake://`, `redis://`) is trusted: whoever is "
        "on it may read pages, and forge them. Needed where the store is not on this machine.",
    )
    tenant: Text = Field(
        "",
        description="Mixed into every name in the store: engines of different tenants never find each other's pages.",
    )
    write: Literal["through", "reuse", "off"] = Field(
        "through",
        description="When a block is written: `through` as soon as it is in host memory; `reuse` when it was loaded "
        "from there once, which writes a fraction; `off` never: others fill the store.",
    )
    wait_s: Seconds = Field(
        2.0,
        description="How long a request waits for its blocks to come from the store before it computes them; with "
        "vLLM a request first waits, for as long at most, for room in host memory.",
    )
    probe_s: Seconds = Field(
        0.05,
        description="How long a request waits for the store to say what it has; then it goes on without the store.",
    )
    get_s: Seconds = Field(
        2.0, description="How long a call that reads or writes a few values may take; then it is given up."
    )
    stuck_s: OptionalSeconds = Field(
        None,
        description="The process with the store's client is killed and started again if it has shown no sign of life "
        "for this long; at least a second more than `get_s` and `probe_s`. Unset: 5 s, or what these demand.",
    )
    batch_pages: Count = Field(8, le=1024, description="Values per call to the store.")
    inflight_pages: Count = Field(
        4096,
        description="At most this many pages are being read, and as many written, at once; each keeps a slot of host "
        "memory.",
    )
    put_bytes_per_s: OptionalSizeBytes = Field(
        None,
        description="The most that this unit writes per second, for networks that others need too. Unset: no limit.",
    )
    ttl_s: OptionalWholeSeconds = Field(
        None,
        description="Blocks become misses this many seconds after they were written, whatever the store keeps.",
    )
    rdma_devices: Words = Field(
        (), description="Mooncake: names of RDMA devices, joined by commas. Unset: TCP."
    )


class GdsConfig(Section):
    """Settings of transfers between files and the engine's pool."""

    use_staged_transfer: bool = Field(
        True,
        description="Move a block through a staging slot with one I/O call and a layout transform. `0` makes one call "
        "for each part of a block that is contiguous in the pool: one call per layer with a layer-first pool.",
    )
    max_staging_blocks: Count = Field(
        64,
        description="Staging slots, each for the bytes of one block in all layers. More of them keep more I/O under "
        "way; transfers of more blocks cycle through them.",
    )
    max_staging_bytes: SizeBytes = Field(
        2 * GIB,
        description="The most memory that staging takes beside the engine's pool, whatever `max_staging_blocks` "
        "says: it is taken at the start, from what the engine could use for its cache. The log says which limit "
        "decided.",
    )
    threads_per_disk: Count = Field(
        4,
        le=64,
        description="Threads that serve each disk; with POSIX and cuFile each has one call under way.",
    )
    register_pool: Annotated[Literal["off", "auto", "on"], BeforeValidator(on_and_off_are_words)] = Field(
        "auto",
        description="Register the engine's pool on a GPU with cuFile where a block is one piece in it, as in "
        "TensorRT-LLM's, so that blocks move straight between disk and pool. `auto`: where calls are seen to go by "
        "GPUDirect Storage; `on`: also where cuFile does not show which way they go (before 1.15). A pool that cannot "
        "be registered passes through staging, and the log says why. `off` leaves the GPU's BAR1 to others.",
    )


class IndexConfig(Section):
    """Settings of the index of stored pages."""

    policy: Literal["lru", "bonus_lru"] = Field(
        "lru",
        description="What leaves a full tier (host memory or disks) first. With `lru` it is the block that was used "
        "longest ago. With `bonus_lru` a block that a request has found counts as used one capacity of the tier "
        "later, so that blocks that are asked for again outlive those that never are; for conversations and agents.",
    )


class KeysConfig(Section):
    """Settings that decide what a block's key is made from."""

    scheme: Literal["engine", "common"] = Field(
        "engine",
        description="`engine` takes the engine's own block hashes. `common` makes keys of token ids, in a namespace "
        "that names weights, KV dtype and block size but no engine, so that vLLM, SGLang and TensorRT-LLM find each "
        "other's pages.",
    )


class IdentityConfig(Section):
    """Settings that keep models and callers apart."""

    model: Text = Field(
        "",
        description="Names the weights (a revision or digest) in the fingerprint that keys are made from; it must "
        "change when they do. Unset: the hub's commit, or the content of the weights files, which each node reads once "
        "while its engine runs.",
    )
    namespace: Text = Field(
        "", description="Mixed into every key: caches of different namespaces never share a block."
    )


class PluginsConfig(Section):
    """Settings of the user's programs that run beside the units."""

    folder: OptionalFolder = Field(
        None,
        description="Absolute path of a folder with programs that run beside each unit (`scheduler_*`, `all_*`) and "
        "its ranks (`worker_0_*`, `all_*`), in processes of their own, from its start to its end: "
        "[plugins.md](plugins.md). The folder and its programs must belong to the engine's user or to root, and nobody "
        "else may be able to write to them. Unset: no plugins.",
    )


class PeersConfig(Section):
    """Settings of page sharing between running units of the same user."""

    share: Annotated[Literal["auto", "host+disk", "disk", "off"], BeforeValidator(off_is_a_word)] = Field(
        "auto",
        description="What units of one model show each other: the pages in host memory (`host+disk`), those in their "
        "folders (`disk`, and with `host+disk`), or nothing (`off`). `auto`: `host+disk` where one engine starts "
        "several units or `host.units_per_node` is above 1, else `disk`. Only units of the same user find each other.",
    )
    store: Literal["own", "once"] = Field(
        "own",
        description="What a unit does with a page that a running peer has in host memory. `own`: it keeps the page "
        "too. `once`: it neither stores the page nor keeps a copy after a load, and takes the page over, where it "
        "still can, when that peer ends. Needs shared host memory, which `peers.share: auto` then means.",
    )
    folder: OptionalFolder = Field(
        None,
        description="Absolute path of the folder in which units find each other; it must belong to the engine's user, "
        "and nobody else may have rights in it. Containers share if they mount the same one. Unset: `flexkv` in "
        "`$XDG_RUNTIME_DIR`, else `/tmp/flexkv-UID`.",
    )
    across_machines: bool = Field(
        False,
        description="Units of several machines read each other's folders while they run. Each machine has its own in "
        "`disk.folders`, and all of them lie in one folder that every machine mounts. Needs `disk.folders` and "
        "`peers.share` other than `off`: [one-cache.md](one-cache.md#several-machines).",
    )
    beat_s: BeatSeconds = Field(
        2.0,
        description="With `peers.across_machines`, how often a unit writes its heartbeat and looks at the files of "
        "others, 0.05 to 60 seconds. A unit whose heartbeat stands still for five of these intervals is gone.",
    )


class ObserveConfig(Section):
    """Settings of logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Least severe message that is logged. Above `debug` nothing is logged per request except "
        "failures: at most ten lines per minute and kind of op, and the number of those left out. A level that the "
        "program's own logging configuration has set for `flexkv` stays, unless this is given.",
    )
    metrics_log_s: Seconds = Field(
        60.0,
        description="How often SGLang and TensorRT-LLM log what was counted, if anything was. vLLM logs it with its "
        "own statistics.",
    )
    nvtx: Annotated[Text, BeforeValidator(off_on_or_path)] = Field(
        "off",
        description="`on`: the threads of the lanes and the stages of layerwise pipelines name their work by NVTX, "
        "so that a profiler (Nsight Systems) shows it beside the engine's kernels. An absolute path names the "
        "library to load. A rank that finds none refuses to start. `off` loads and calls nothing.",
    )
