"""`flexkv simulate`: runs the real cache manager through random actions and failures, and compares every answer with a
model.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from flexkv.errors import ContractError
from flexkv.observe import get_logger
from flexkv.simulation.base import SimulationConfig, SimulationReport
from flexkv.simulation.run import Simulation

RULE_BROKEN_EXIT_CODE = 1


@click.command()
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the run. The same seed takes the same steps."
)
@click.option(
    "--steps", default=20_000, show_default=True, type=click.IntRange(min=1), help="Number of random actions."
)
@click.option(
    "--ranks",
    default=2,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of workers, each of which reports every op.",
)
@click.option(
    "--failure-rate",
    default=0.03,
    show_default=True,
    type=click.FloatRange(0, 1),
    callback=lambda ctx, option, value: number(value),
    help="Share of the moved pages that fail.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def command(
    ctx: click.Context, seed: int, steps: int, ranks: int, failure_rate: float, as_json: bool
) -> None:
    """Run the cache manager through random loads, stores, failures, late reports, aborts, lost pools and resets.

    Every answer is compared with a model, and every loaded page with the page that was stored under its key. Exit
    code 1: a rule was broken; the message gives the rule, the seed and the step.
    """
    simulation = Simulation(SimulationConfig(seed, steps, ranks=ranks, failure_rate=failure_rate))
    started = time.perf_counter()
    try:
        with _quiet():
            report = simulation.run()
    except ContractError as error:
        place = f"seed {seed}, after step {simulation.report.steps} of {steps}"
        click.echo(f"rule broken ({place}): {type(error).__name__}: {error}", err=True)
        ctx.exit(RULE_BROKEN_EXIT_CODE)
    _print(report, seed, time.perf_counter() - started, as_json)


def number(value: float) -> float:
    """Returns `value` if it is a number, not NaN.

    Raises:
        BadParameter: `value` is NaN, which click accepts in any range.
    """
    if math.isnan(value):
        raise click.BadParameter("nan is not in the range 0<=x<=1.")
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences warnings within the `with` block, because the simulation makes thousands of ops fail on purpose."""
    logger = get_logger("flexkv")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _print(report: SimulationReport, seed: int, seconds: float, as_json: bool) -> None:
    facts = {
        "seed": seed,
        "steps": report.steps,
        "verified pages": report.verified_pages,
        "failed pages": report.failed_pages,
        **{name.replace("_", " "): count for name, count in asdict(report.stats).items() if name != "missed"},
        **{f"missed {reason.reason}": blocks for reason, blocks in report.stats.missed.items()},
    }
    if as_json:
        click.echo(json.dumps({**facts, "actions": report.actions}, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, f"{value:,}")
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"no rule broken in {report.steps:,} steps ({seconds:.1f} s)")
