"""Body of `flexkv simulate`: random runs of the cache manager against its model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

from flexkv.cache.simulation import Simulation, SimulationConfig
from flexkv.errors import ContractError


@dataclasses.dataclass(frozen=True)
class SimulateResult:
    """What the runs showed.

    Attributes:
        broken: the first rule that was broken, with its seed; empty when none was.
    """

    runs: int
    steps: int
    seconds: float
    verified_pages: int
    failed_pages: int
    broken: str
    stats: Mapping[str, int]


def run(
    seeds: int = 20,
    steps: int = 6_000,
    first_seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SimulateResult:
    """Takes `steps` random steps for each of `seeds` seeds and stops at the first broken rule.

    Args:
        progress: called with (runs done, runs in all) after each run.
    """
    started = time.perf_counter()
    totals: dict[str, int] = {}
    done = verified = failed = 0
    broken = ""
    for seed in range(first_seed, first_seed + seeds):
        config = SimulationConfig(seed=seed, steps=steps, ranks=1 + seed % 3, ordered_reports=seed % 4 != 3)
        try:
            report = Simulation(config).run()
        except ContractError as error:
            broken = f"seed {seed}: {error}"
            break
        done += 1
        verified += report.verified_pages
        failed += report.failed_pages
        for name, value in dataclasses.asdict(report.stats).items():
            totals[name] = totals.get(name, 0) + value
        if progress is not None:
            progress(done, seeds)
    seconds = time.perf_counter() - started
    return SimulateResult(done, done * steps, seconds, verified, failed, broken, totals)
