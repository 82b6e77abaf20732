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
"""On a machine with this many CPUs or fewer, a second copy thread would take CPU time from the engine's own threads."""
MAX_VERIFY_THREADS = 16
"""More threads would not digest a piece of 8 MiB faster, and the native core does not accept more."""
MIN_PREFETCH_LAYERS, MAX_PREFETCH_LAYERS = 2, 16
"""Bounds of `load.prefetch_layers`. With two layers, one layer is filled while the other one is used. More than sixteen
layers hide no more latency."""


class Section(BaseModel):
    """Base of the models of all sections."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class HostConfig(Section):
    """Settings of the tier in host memory."""

    bytes: OptionalSizeBytes = Field(
        None,
        description="Size of the host tier of one ownership unit (in vLLM: one data-parallel rank with all its "
        "tensor-parallel ranks). Unset: `memory_share` decides. Cannot be combined with `bytes_per_rank`.",
    )
    bytes_per_rank: OptionalSizeBytes = Field(
        None,
        description="Size of the host tier per rank: flexkv multiplies it by the number of the unit's ranks. For "
        "sizes that are known per worker. Cannot be combined with `bytes`.",
    )
    memory_share: Share = Field(
        0.5,
        description="Share of the memory that is free at start. All units of the node take it together if no size is "
        "given. One half leaves memory for loading the engine's weights and for the page cache.",
    )
    units_per_node: Count = Field(
        1,
        le=1024,
        description="Number of ownership units that start on this node. Each takes an equal part of `memory_share` "
        "and of `disk.space_share`. Units cannot see each other at start, so the number has to be given.",
    )
    extent_bytes: SizeBytes = Field(
        GIB,
        ge=2 * MIB,
        le=GIB,
        multiple_of=2 * MIB,
        description="The host pool is mapped, pinned and bound to a NUMA node in extents of this size. Smaller "
        "extents can be used sooner. The maximum is 1 GiB, the most that the kernel registers for I/O at once.",
    )
    huge_pages: Annotated[Literal["auto", "off"], BeforeValidator(off_is_a_word)] = Field(
        "auto",
        description="`auto` takes 2 MiB pages if the machine provides them, and logs how much of the pool has them. "
        "`off` is for machines on which compaction stalls are worse than slower copies.",
    )
    numa_node: OptionalNode = Field(
        None,
        description="NUMA node from which the pool's memory is taken as long as the node has any. The node next to "
        "the GPU and the disks copies fastest. Unset: the kernel decides, usually for the node of the thread that "
        "touches the memory.",
    )
    verify: bool = Field(
        False,
        description="Compute a digest of every page when it is stored, and check it at every load. A page that does "
        "not match is never used. This costs one more pass over the bytes. For machines whose memory may be faulty.",
    )
    verify_threads: Count = Field(
        4,
        le=MAX_VERIFY_THREADS,
        description="Number of threads per rank that compute and check digests for copies to and from a GPU, so that "
        "a link is not limited to what one core can digest. Loads go before stores. `1`: only the threads that move "
        "the pages do this work. Without `verify` there are no such threads.",
    )


class StoreConfig(Section):
    """Settings that decide which blocks are stored, and when."""

    mode: Literal["eager", "lazy", "layerwise"] = Field(
        "eager",
        description="`eager` stores a block as soon as its KV is certain, so that the next turn finds it. With a "
        "disk, a restart finds it too, however the engine ended. `layerwise` does the same, but stores each layer "
        "while the forward computes the next one (vLLM only). `lazy` stores the blocks that the engine is about to "
        "evict: it moves fewer bytes, but blocks that are in the engine when it stops are lost.",
    )
    tokens: Literal["all", "prompt"] = Field(
        "all",
        description="`prompt` stores only blocks of prompts. `all` also stores blocks of generated tokens, which the "
        "next turn of a conversation asks for.",
    )
    generated_blocks: Count = Field(
        4,
        description="Number of blocks that a running request generates before `eager` and `layerwise` store them "
        "together (vLLM): a store costs the engine's step the same for one block as for many. The rest is stored when "
        "the request ends, but a crash or a preemption loses it.",
    )
    partial_blocks: bool = Field(
        False,
        description="Also store the tokens at the end of a request that do not fill a block. This saves the recompute "
        "of less than one block per hit and costs one slot per request, so it pays only for short prompts.",
    )
    max_reference_share: Share = Field(
        0.25,
        description="Share of the engine's blocks that may have a store in flight although no request holds them: "
        "blocks of lazy stores, and of stores that begin after their request's end. If the engine reuses such a "
        "block, its next step waits a moment for the copy to finish, so a larger share makes more steps wait. Blocks "
        "of full attention that live requests hold do not count.",
    )
    hold_s: Seconds = Field(
        2.0,
        description="How long after its request's end a block still waits if its store found no free slot or queue "
        "entry (vLLM). The engine may reuse such a block at any time; the block is then not stored.",
    )
    checkpoint_tokens: OptionalCount = Field(
        None,
        description="For models with several KV groups (sliding windows, chunks, recurrent states): distance in "
        "tokens between the positions in a long prompt at which a hit may end, besides the prompt's end. Windows and "
        "states are stored at these positions. A smaller distance costs more bytes, and prompts with a common "
        "beginning can reuse more of it. Unset: 8 windows, but at least 4096.",
    )
    inflight_pages: Count = Field(
        65_536,
        description="Maximum number of pages with a store in flight. In vLLM a further page waits, at most until "
        "`store.hold_s` after its request's end. Other engines drop and count it, because a cache must never make the "
        "engine wait. Also the maximum number of pages that wait to be written to disk, or to a shared store.",
    )


class LoadConfig(Section):
    """Settings that decide how hits are loaded."""

    mode: Literal["async", "sync", "layerwise"] = Field(
        "async",
        description="`async` lets the engine run other requests while a hit loads. `sync` loads within the step, "
        "before its forward. `layerwise` loads during the forward, which waits for each layer when it reaches it. "
        "`sync` and `layerwise` have the lowest latency for one request at a time. In vLLM they need "
        "`--no-async-scheduling` and, on GPUs, `VLLM_USE_V2_MODEL_RUNNER=0`; otherwise its loads are async, and one "
        "warning says so.",
    )
    layer_hooks: Literal["auto", "trust"] = Field(
        "auto",
        description="For `load.mode` `layerwise` in TensorRT-LLM. `auto`: a forward may start before its loads have "
        "finished if the engine's arguments say that every forward calls the hooks of its layers. `trust`: it may "
        "always do so, and fails with an error if it does not call the hooks.",
    )
    deadline_s: Seconds = Field(
        30.0,
        description="A load that takes longer is given up, and its blocks are recomputed. They stay pinned until the "
        "last byte has stopped moving.",
    )
    lease_s: Seconds = Field(
        60.0,
        description="How long a lookup keeps its slots from eviction if the engine does not act on it.",
    )
    lookup_wait_s: Seconds = Field(
        1.0,
        description="How long a lookup waits for pages from disk or from a shared store in engines that cannot be "
        "told to look up again later (SGLang's linker, TensorRT-LLM). Pages that have not arrived by then are "
        "computed. The engine's other requests stand still meanwhile. In TensorRT-LLM this limits the sum of all "
        "waits between two steps.",
    )
    inflight_pages: Count = Field(
        65_536,
        description="Maximum number of pages that are promised or being loaded. A longer hit is cut, because a "
        "promise must be kept. Also the maximum number of pages that are being read from disk.",
    )
    prefetch_layers: Count = Field(
        2,
        ge=MIN_PREFETCH_LAYERS,
        le=MAX_PREFETCH_LAYERS,
        description="Number of layers that blending holds at once: the layer in use, and those that are loaded and "
        "rotated ahead of it. Each takes the memory of one layer of the whole prompt, or under vLLM of the step's "
        "part of it. A larger number helps if layers arrive at uneven intervals.",
    )


class TransferConfig(Section):
    """Settings of the data plane."""

    queue_ops: Count = Field(
        1024,
        le=1 << 20,
        description="Number of operations that may wait in each lane. In vLLM a further store waits, at most until "
        "`store.hold_s` after its request's end. Other engines drop and count it.",
    )
    copy_threads: Annotated[Literal["auto"] | Count, BeforeValidator(auto_or_count)] = Field(
        "auto",
        description="Threads that copy if the engine's pool is plain memory. `auto`: 1, or 2 with more than 4 CPUs.",
    )
    batch_copies: bool = Field(
        True,
        description="Let a GPU's copy engine take copies in batches if the driver passes a test at start. `false` is "
        "for drivers that pass the test and hang later.",
    )
    copy_kernel: bool = Field(
        True,
        description="Let a kernel on one or two multiprocessors make a GPU's stores and load its short runs. `false` "
        "leaves all of them to the copy engine, which is slower for short runs. The kernel takes no multiprocessor "
        "from the model, but its stores slow down the engine's steps more than the copy engine's stores do.",
    )
    ways_file: Text = Field(
        "",
        description="A file that `flexkv bench transfer --save` has written. It says up to which length a kernel "
        "copies a GPU's runs, and applies only to the GPU, link, driver and version of flexkv with which it was "
        "measured. Any other GPU uses the built-in lengths, and a warning says so.",
    )
    stuck_s: Seconds = Field(
        60.0,
        description="If nothing in an operation has moved for this long, its lane goes down. The operation's slots "
        "stay out of use until it ends, because bytes in flight cannot be recalled.",
    )
    close_s: Seconds = Field(
        10.0,
        description="How long a shutdown waits for operations in flight. It then leaves the rest and says so.",
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
        description="Absolute paths joined by `:` or `,`, one per disk. Blocks are striped over the disks, and a disk "
        "that fails is taken out of use. YAML and the extra config may also give a list, which is necessary if a "
        "folder's name contains `:` or `,`. Names must be UTF-8. Unset: no disk tier.",
    )
    bytes_per_folder: OptionalSizeBytes = Field(
        None,
        description="Number of bytes that one ownership unit fills in each folder. Unset: `space_share` decides.",
    )
    space_share: Share = Field(
        0.5,
        description="Share of each folder's file system that all units of the node fill together if no size is given. "
        "It counts bytes that are free or already in the folder. One half leaves space for others. 1 leaves it only "
        "for headers and index.",
    )
    mode: Literal["through", "back", "evict"] = Field(
        "through",
        description="When a block is written. `through`: as soon as it is in host memory. `back`: when the disks are "
        "quiet, or at the latest before it leaves host memory. `evict`: only before it leaves host memory; this "
        "writes least, but a crash loses most.",
    )
    ttl_s: OptionalWholeSeconds = Field(
        None,
        description="Blocks become misses this many seconds after they were written, for data that must not be kept "
        "longer.",
    )
    wait_s: Seconds = Field(
        30.0,
        description="How long a request waits for its blocks to be read from disk before it computes them, because a "
        "slow disk must not hold a request forever. In vLLM a request first waits, at most as long again, for host "
        "memory if other requests hold the slots that the read needs.",
    )
    prefetch_requests: CountOrNone = Field(
        16,
        description="Number of requests in the engine's queue whose blocks are read from disk before the engine first "
        "asks for them. 0: reads begin when the engine asks. The blocks take at most a quarter of host memory. For "
        "vLLM and SGLang's linker.",
    )
    compute_if_faster: bool = Field(
        True,
        description="Let the engine compute blocks that are on disk if recent measurements say that it does so sooner "
        "than the disk reads them. `false` is for engines whose time is worth more than a request's.",
    )
    stream: bool = Field(
        False,
        description="Promise blocks that are on disk as soon as their read is planned, and copy each to the engine "
        "when it has arrived and is verified (with `load.mode` layerwise: each of its layers). So reading and loading "
        "overlap. A page that fails is computed. The request holds its engine blocks meanwhile. With `load.mode` sync "
        "or layerwise the step stands still until the bytes that it needs next have arrived. Needs vLLM with "
        "`kv_load_failure_policy` recompute. Blended segments arrive layer by layer whatever `load.mode` and the "
        "policy are.",
    )
    gds: Annotated[Literal["off", "auto", "on"], BeforeValidator(on_and_off_are_words)] = Field(
        "auto",
        description="Load blocks that are on disk straight to the engine's pool, without a slot of host memory. "
        "`auto`: if the ranks have GPUDirect Storage, and as long as this is measured to be faster than reading to "
        "host memory and copying (with `load.mode` async). `on`: always, also through io_uring or POSIX calls and a "
        "copy. For vLLM with `kv_load_failure_policy` recompute; for other engines see `disk.gds_may_fail_requests`.",
    )
    gds_may_fail_requests: bool = Field(
        False,
        description="Allow `disk.gds` for an engine that cannot compute pages that a load did not bring: SGLang, "
        "TensorRT-LLM, or vLLM without `kv_load_failure_policy` recompute. Such a load is promised before it is read. "
        "If a page then proves bad or cannot be read, its request fails (in SGLang its whole forward, in TensorRT-LLM "
        "with `load.mode` sync or layerwise the step). A read that hangs forever makes the engine hang. Bytes that "
        "failed are never used. Needs `disk.gds` on.",
    )
    gds_stores: bool = Field(
        False,
        description="Store blocks from the engine's pool straight to disk, and not in host memory. For machines with "
        "less spare host memory than disk bandwidth. Needs `disk.gds` on, `disk.mode` through, `store.mode` eager.",
    )
    write_pages: Count = Field(
        4096,
        description="Maximum number of pages being written at once. Their slots in host memory cannot be evicted.",
    )
    io: IoBackend = Field(
        "auto",
        description="`auto` uses io_uring if the kernel allows it, otherwise threads that read and write.",
    )
    depth: Count = Field(
        32,
        le=1024,
        description="Number of reads and writes in flight at once per disk; more would only queue in the device. "
        "Threads have at most 8, and the log says so.",
    )
    register_buffers: bool = Field(
        False,
        description="Let io_uring keep the whole host pool pinned, instead of pinning the pages of each read and "
        "write. The pool then counts against the `memlock` limit, once per disk. docs/benchmarks.md says what this "
        "gains. If the kernel refuses, I/O continues without it, and the log says why.",
    )
    stuck_s: Seconds = Field(
        30.0,
        description="If a read or write takes longer, its disk is taken out of use. The other disks continue.",
    )


class RemoteConfig(Section):
    """Settings of the tier in a store that machines share."""

    urls: Urls = Field(
        (),
        description="Address of the shared store: one `mooncake://HOST:PORT` (its master), or one or more "
        "`redis://HOST[:PORT][/DATABASE]` or `rediss://` (TLS) joined by commas. Values are distributed over several "
        "servers. Unset: no remote tier.",
    )
    user: Text = Field("", description="Redis: name of an ACL user. Unset: the default user.")
    password_file: Text = Field(
        "",
        description="Redis: a file with the password, which nobody but its owner may be able to read. It is never "
        "shown.",
    )
    ca_file: Text = Field(
        "",
        description="Redis with TLS: file of the certificates by which servers are trusted. Unset: the system's.",
    )
    trusted_network: bool = Field(
        False,
        description="The network to a store that sends plain text (`mooncake://`, `redis://`) is trusted, so that "
        "everyone on it can read pages and forge them. Such a store needs this unless it is on this machine.",
    )
    tenant: Text = Field(
        "",
        description="Part of every name in the store. Engines of different tenants never find each other's pages.",
    )
    write: Literal["through", "reuse", "off"] = Field(
        "through",
        description="When a block is written. `through`: as soon as it is in host memory. `reuse`: when it has been "
        "loaded from host memory once, which writes a fraction. `off`: never, because others fill the store.",
    )
    wait_s: Seconds = Field(
        2.0,
        description="How long a request waits for its blocks from the store before it computes them. In vLLM a "
        "request first waits, at most as long again, for host memory.",
    )
    probe_s: Seconds = Field(
        0.05,
        description="How long a request waits for the store to say what it has. Then the request continues without it.",
    )
    get_s: Seconds = Field(
        2.0, description="How long a call that reads or writes a few values may take before it is given up."
    )
    stuck_s: OptionalSeconds = Field(
        None,
        description="If the process with the store's client shows no sign of life for this long, flexkv kills and "
        "restarts it. At least one second more than `get_s` and `probe_s`. Unset: 5 s, or one second more than the "
        "longer of these two if that is more.",
    )
    batch_pages: Count = Field(8, le=1024, description="Number of values per call to the store.")
    inflight_pages: Count = Field(
        4096,
        description="Maximum number of pages being read at once, and of those being written. Each keeps a slot of "
        "host memory. Those being written keep at most an eighth of the slots, or `batch_pages` if that is more.",
    )
    put_bytes_per_s: OptionalSizeBytes = Field(
        None,
        description="Most bytes that this unit writes per second, for networks that others need. Unset: no limit.",
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
        "for each part of a block that is contiguous in the pool: with a layer-first pool, one call per layer.",
    )
    max_staging_blocks: Count = Field(
        64,
        description="Number of staging slots, each for the bytes of one block in all layers. More slots keep more I/O "
        "in flight. A transfer of more blocks than slots uses the slots in turn.",
    )
    max_staging_bytes: SizeBytes = Field(
        2 * GIB,
        description="Maximum memory for staging beside the engine's pool, whatever `max_staging_blocks` says. It is "
        "allocated at start, from memory that the engine could use for its cache. The log says which limit applied.",
    )
    threads_per_disk: Count = Field(
        4,
        le=64,
        description="Number of threads that serve each disk. With POSIX and cuFile, each has one call in flight.",
    )
    register_pool: Annotated[Literal["off", "auto", "on"], BeforeValidator(on_and_off_are_words)] = Field(
        "auto",
        description="Register the engine's pool on a GPU with cuFile if each block is contiguous in it, as in "
        "TensorRT-LLM's, so that blocks move straight between disk and pool. `auto`: if cuFile shows that calls use "
        "GPUDirect Storage. `on`: also if cuFile does not show which route they take (before 1.15). A pool that "
        "cannot be registered passes through staging, and the log says why. `off` leaves the GPU's BAR1 to others.",
    )


class IndexConfig(Section):
    """Settings of the index of stored pages."""

    policy: Literal["lru", "bonus_lru"] = Field(
        "lru",
        description="Which block leaves a full tier (host memory or disks) first. `lru`: the block that was used "
        "longest ago. `bonus_lru`: the same, but a block that a request has found counts as used one capacity of the "
        "tier later. Blocks that are asked for again thus outlive those that never are; for conversations and agents.",
    )


class KeysConfig(Section):
    """Settings that decide what a block's key is made from."""

    scheme: Literal["engine", "common"] = Field(
        "engine",
        description="`engine` uses the engine's own block hashes. `common` computes keys from token ids, in a "
        "namespace that identifies weights, KV dtype and block size but no engine, so that vLLM, SGLang and "
        "TensorRT-LLM find each other's pages.",
    )


class IdentityConfig(Section):
    """Settings that keep models and callers apart."""

    model: Text = Field(
        "",
        description="Name of the weights (a revision or digest) in the fingerprint that is part of every key. It must "
        "change when the weights do. Unset: the hub's commit, or the content of the weights files, which each node "
        "reads once while its engine runs.",
    )
    namespace: Text = Field(
        "", description="Part of every key: caches with different namespaces never share a block."
    )


class PluginsConfig(Section):
    """Settings of the user's programs that run beside the units."""

    folder: OptionalFolder = Field(
        None,
        description="Absolute path of a folder with programs that run beside each unit (`scheduler_*`, `all_*`) and "
        "its ranks (`worker_0_*`, `all_*`). Each runs in a process of its own, from the unit's start to its end: "
        "[plugins.md](plugins.md). The folder and its programs must belong to the engine's user or to root, and "
        "nobody else may be able to write to them. Unset: no plugins.",
    )


class PeersConfig(Section):
    """Settings of page sharing between running units of the same user."""

    share: Annotated[Literal["auto", "host+disk", "disk", "off"], BeforeValidator(off_is_a_word)] = Field(
        "auto",
        description="What units of one model show each other. `host+disk`: the pages in host memory and in their "
        "folders. `disk`: only those in folders. `off`: nothing. `auto`: `host+disk` if one engine starts several "
        "units or `host.units_per_node` is above 1, else `disk`. Only units of the same user find each other.",
    )
    store: Literal["own", "once"] = Field(
        "own",
        description="What a unit does with a page that a running peer has in host memory. `own`: it keeps the page "
        "too. `once`: it does not store the page and keeps no copy after a load; when that peer ends, it takes the "
        "page over if it still can. `once` needs shared host memory, so `peers.share: auto` then means `host+disk`.",
    )
    folder: OptionalFolder = Field(
        None,
        description="Absolute path of the folder in which units find each other. It must belong to the engine's user, "
        "and nobody else may have rights in it. Containers that mount the same folder share. Unset: `flexkv` in "
        "`$XDG_RUNTIME_DIR`, or `/tmp/flexkv-UID` if that is not set.",
    )
    across_machines: bool = Field(
        False,
        description="Let units of several machines read each other's folders while they run. Each machine "
        "lists its own folders in `disk.folders`, and all of them lie in one folder that every machine mounts. Needs "
        "`disk.folders`, and `peers.share` other than `off`: [one-cache.md](one-cache.md#several-machines).",
    )
    beat_s: BeatSeconds = Field(
        2.0,
        description="Interval of 0.05 to 60 seconds at which a unit with `peers.across_machines` writes its heartbeat "
        "and reads the files of others. A unit whose heartbeat stands still for five intervals counts as gone.",
    )


class ObserveConfig(Section):
    """Settings of logs, metrics and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Least severe level that is logged. Above `debug`, failures are all that is logged per request: "
        "at most ten lines per minute and kind of op, and the number of those left out. If the program's own logging "
        "configuration has set a level for `flexkv`, that level stays unless this setting is given.",
    )
    metrics_log_s: Seconds = Field(
        60.0,
        description="Interval at which flexkv logs changed counts in SGLang and TensorRT-LLM. vLLM logs them itself.",
    )
    nvtx: Annotated[Text, BeforeValidator(off_on_or_path)] = Field(
        "off",
        description="`on`: the lanes' threads and the stages of layerwise pipelines mark their work with NVTX, so "
        "that a profiler (Nsight Systems) shows it beside the engine's kernels. An absolute path gives the library to "
        "load. A rank that finds no library refuses to start. `off` loads and calls nothing.",
    )
