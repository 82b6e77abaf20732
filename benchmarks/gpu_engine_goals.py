"""Goals for the effects of copies on the inference engine: how much copies slow down its own work, how long single
loads and stores take, and how much CPU time copies need.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_goal import Goal, Row, least, most

KIB = 1 << 10
STEP, PRODUCT = "decoding step", "large product"
SMALL = ("small D2H", "small H2D")
"""Names of the engine's small copies in the rows of `flexkv bench transfer --part beside`."""
BOTH = "both"
KERNEL = "kernel"
BLOCK_RUN = 4 * KIB
MANY_BLOCKS = 1024


def beside_goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns the goals for the speed of the engine's own work while loads and stores run."""
    measured = [row for row in rows if row["factor"] is not None and row["pinned"]]
    one_way = [row for row in measured if row["direction"] != BOTH]
    by_engine = [row for row in one_way if row["path"] != KERNEL]
    by_kernel = [row for row in one_way if row["path"] == KERNEL]

    def factor(chosen: Sequence[Row], work: str) -> float | None:
        return most(row["factor"] for row in chosen if row["work"] == work)

    def more_ms(chosen: Sequence[Row], *works: str) -> float | None:
        return most(row["beside_p99_ms"] - row["alone_p99_ms"] for row in chosen if row["work"] in works)

    product = factor(one_way, PRODUCT)
    short = [row for row in one_way if row["work"] == PRODUCT and row["run_bytes"] == BLOCK_RUN]
    return [
        Goal("a decoding step beside copies by copy engine: of alone", 1.06, factor(by_engine, STEP), True),
        Goal("its p99, more than alone, ms", 0.2, more_ms(by_engine, STEP), True),
        Goal("p99 of the engine's 4 KiB copies beside them, more than alone, ms", 0.2,
             more_ms(by_engine, *SMALL), True),
        Goal("a decoding step beside copies by kernel: of alone", 1.15, factor(by_kernel, STEP), True),
        Goal("a decoding step beside both ways at once: of alone", 1.20,
             factor([row for row in measured if row["direction"] == BOTH], STEP), True),
        Goal("a large product beside either way: of its rate alone", 0.98,
             None if product is None else 1 / product),
        Goal("loads beside the large product, runs of 4 KiB, GB/s", 40.0,
             least(row["load_gbps"] for row in short)),
        Goal("stores beside the large product, runs of 4 KiB, GB/s", 20.0,
             least(row["store_gbps"] for row in short)),
    ]  # fmt: skip


def latency_goals(rows: Sequence[Row], link_gbps: float | None) -> list[Goal]:
    """Returns the goals for the time of single layerwise loads and single stores while nothing else runs.

    Args:
        link_gbps: measured rate of one contiguous load in GB/s; None if it was not measured.
    """
    pinned = [row for row in rows if row["pinned"]]

    def ms(what: str, run_bytes: int, blocks: int) -> float | None:
        return most(
            row["p50_us"] / 1e3
            for row in pinned
            if (row["what"], row["run_bytes"], row["blocks"]) == (what, run_bytes, blocks)
        )

    found = []
    for words, run_bytes, blocks, load, store in (
        ("1 block of 8 layers of 4 KiB", BLOCK_RUN, 1, 0.040, 0.040),
        ("1,024 blocks of 8 layers of 4 KiB (33 MB)", BLOCK_RUN, MANY_BLOCKS, 0.85, 1.1),
        ("1,024 blocks of 8 layers of 32 KiB (268 MB)", 32 * KIB, MANY_BLOCKS, 5.8, 5.9),
    ):
        found += [
            Goal(f"load by layer of {words}, ms", load, ms("load by layer", run_bytes, blocks), True),
            Goal(f"store of {words}, ms", store, ms("store", run_bytes, blocks), True),
        ]
    first = None
    if link_gbps:
        first = most(
            row["first_layer_us"] - row["run_bytes"] * row["blocks"] / link_gbps / 1e3
            for row in pinned
            if row["first_layer_us"] is not None
        )
    return [*found, Goal("first layer of a load, more than its bytes take, us", 30.0, first, True)]


def processor_goals(rows: Sequence[Row]) -> list[Goal]:
    """Returns the goals for the CPU time of the process that makes the copies."""

    def cores(idle: bool, kernel: bool = False) -> float | None:
        return most(
            row["cores"]
            for row in rows
            if row["pinned"] and (row["what"] == "idle") is idle and (row["path"] == KERNEL) is kernel
        )

    return [
        Goal("CPU while the link is full, by kernel, cores", 0.3, cores(idle=False, kernel=True), True),
        Goal("CPU while the link is full, by copy engine, cores", 1.1, cores(idle=False), True),
        Goal("CPU when idle, cores", 0.005, cores(idle=True), True),
    ]
