"""`flexkv remote`: checks whether the shared store is alive, measures it, and inspects its values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from flexkv.cli.config_command import parse_extra
from flexkv.cli.remote.bench import BenchResult
from flexkv.cli.remote.child import run_job
from flexkv.cli.remote.stored_value import NAME, StoredValue
from flexkv.cli.tables import print_table
from flexkv.config import load_config
from flexkv.config.sizes import format_size, parse_size
from flexkv.errors import ConfigError
from flexkv.remote.base import StoreOptions
from flexkv.remote.settings import store_options

FAILED_EXIT_CODE = 1
DEADLINE_S = 5.0
"""Deadline of a request to the store, in seconds. The client library's call may take a few seconds more."""
SPARE_S = 30.0
"""A job in a separate process is ended if it takes this many seconds longer than expected."""
MOST_BENCH_BYTES = 4 << 30
MOST_NAMES = 1000
"""The maximum number of names per command. For each name, the command reads or removes a value."""

KEY = re.compile(r"[0-9a-f]{32}")
PREFIX = re.compile(r"flexkv/[0-9]{1,4}/[0-9a-f]{32}/[0-9]{1,9}/?")


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that all commands of `flexkv remote` have."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
        click.option(
            "--extra",
            metavar="JSON",
            help="The engine's extra config, as you would pass it in kv_connector_extra_config.",
        ),
    ):
        command = option(command)
    return command


def _named(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--prefix",
        metavar="PREFIX",
        help="Part of a name before the KEY: flexkv/1/OWNER/GROUP. Needed if a KEY is given alone.",
    )(command)
    return click.argument("names", nargs=-1, required=True, metavar="NAME|KEY...")(command)


@click.group()
def command() -> None:
    """Check the store of the remote tier, measure it, and inspect or remove its values."""


@command.command("ping", short_help="Check whether each server answers.")
@_shared
def ping(as_json: bool, extra: str | None) -> int:
    """Check whether each server of remote.urls answers, and how long an answer takes. Exit code 1: a server is not
    usable.

    With Mooncake only the master is asked; `bench` shows whether any memory is registered with it."""
    options = _options(extra)
    found = run_job(options, "ping", DEADLINE_S, most_s=2 * DEADLINE_S * len(options.urls) + SPARE_S)
    if as_json:
        click.echo(json.dumps([asdict(server) for server in found], indent=2))
    else:
        for server in found:
            if server.why_not:
                click.echo(f"{server.url}: not usable: {server.why_not}")
            else:
                click.echo(
                    f"{server.url}: reached, round trip {server.round_trip_ms:.2f} ms "
                    f"(the first, with connecting, {server.first_ms:.1f} ms)"
                )
    return FAILED_EXIT_CODE if any(server.why_not for server in found) else 0


@command.command("bench", short_help="Measure puts, gets and questions with temporary values.")
@click.option("--bytes", "size", default="2MiB", show_default=True, help="Size of each value.")
@click.option(
    "--values", default=64, show_default=True, type=click.IntRange(1, 100_000), help="Number of values."
)
@click.option(
    "--batch", type=click.IntRange(1, 1024), help="Values per call. Default: the setting remote.batch_pages."
)
@click.option(
    "--seconds",
    default=30,
    show_default=True,
    type=click.IntRange(1, 600),
    help="No call begins after this time.",
)
@_shared
def bench(size: str, values: int, batch: int | None, seconds: int, as_json: bool, extra: str | None) -> int:
    """Put values, ask whether the store has them, get them back and compare them, in batches and one per call. Their
    names begin with flexkv-bench/, and they are removed at the end. Exit code 1: something failed, or a value was
    left in the store."""
    value_bytes = _size(size)
    if not 8 <= value_bytes <= 1 << 30 or value_bytes * values > MOST_BENCH_BYTES:
        raise ConfigError(
            f"--bytes={size} --values={values}: allowed are values of 8 bytes to 1 GiB, "
            f"{format_size(MOST_BENCH_BYTES)} together"
        )
    config = load_config(parse_extra(extra))
    options = _options(extra)
    batch = min(values, batch or config.remote.batch_pages)
    result = run_job(
        options, "bench", value_bytes, values, batch, float(seconds), most_s=seconds + 2 * SPARE_S
    )
    if as_json:
        click.echo(json.dumps(asdict(result), indent=2))
    else:
        _print_bench(result)
    return FAILED_EXIT_CODE if result.reason or result.wrong or result.left else 0


def _print_bench(result: BenchResult) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("what", "per call", "calls", "done", "failed", "rate", "median call", "of one per call"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in result.rows:
        rate = f"{row.rate:.2f} GB/s" if row.unit == "GB/s" else f"{row.rate:,.0f} names/s"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(
            row.what,
            str(row.per_call),
            str(row.calls),
            str(row.good),
            str(row.failed),
            rate,
            f"{row.call_ms:.2f} ms",
            ratio,
        )
    print_table(table)
    click.echo(f"values of {format_size(result.value_bytes)}; {result.removed} removed again")
    if result.reason:
        click.echo(f"failed: {result.reason}", err=True)
    if result.wrong:
        click.echo(f"{result.wrong} values came back with OTHER BYTES", err=True)
    if result.left:
        click.echo(f"still there: {', '.join(result.left[:3])}, {len(result.left)} in all", err=True)


@command.command("get", short_help="Describe values.")
@_named
@_shared
def get(names: tuple[str, ...], prefix: str | None, as_json: bool, extra: str | None) -> int:
    """Describe the values with these names: size, key, tokens, age, expiry, and which parts can be verified here. Exit
    code 1: a value is not in the store, or its trailer makes it a miss.

    Trailer, key and KV group are verified. Only the engine knows which bytes belong to which digest. The digests are
    therefore compared on the assumption that all runs have the same length, as in most models."""
    full = full_names(names, prefix)
    found: list[StoredValue | None] = run_job(
        _options(extra), "look", full, DEADLINE_S, most_s=2 * DEADLINE_S * len(full) + SPARE_S
    )
    if as_json:
        shown = [None if value is None else asdict(value) for value in found]
        click.echo(json.dumps(dict(zip(full, shown, strict=True)), indent=2))
    else:
        console = Console(markup=False, highlight=False, soft_wrap=True)
        for name, value in zip(full, found, strict=True):
            for line in _lines(name, value):
                console.print(line)
    return FAILED_EXIT_CODE if any(value is None or value.fault for value in found) else 0


def _lines(name: str, value: StoredValue | None) -> list[str]:
    if value is None:
        return [f"{name}: not in the store"]
    lines = [f"{name}: {value.fault or 'a whole value'}", f"  size      {value.bytes} bytes"]
    if not value.runs:
        return lines
    return [
        *lines,
        f"  key       {value.key}",
        f"  tokens    {value.tokens}",
        f"  KV group  {value.group}",
        f"  written   {_when(value.written)}",
        f"  expiry    {_when(value.expiry) if value.expiry else 'never'}",
        f"  digests   {_digests(value)}",
    ]


def _digests(value: StoredValue) -> str:
    if value.runs_matching is None:
        return f"{value.runs}, not compared: they are not of runs of equal length, or the trailer is damaged"
    if value.runs_matching == value.runs:
        return f"all {value.runs} match"
    if not value.runs_matching:
        return f"{value.runs}, not compared: either the runs are not of equal length, or all are damaged"
    others = "the others are damaged, or of other lengths"
    return f"{value.runs_matching} of {value.runs} match as runs of equal length: {others}"


def _when(unix_s: int) -> str:
    try:
        return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{unix_s} s after 1970"


@command.command("drop", short_help="Remove values.")
@_named
@_shared
def drop(names: tuple[str, ...], prefix: str | None, as_json: bool, extra: str | None) -> int:
    """Remove the values with these names, even if engines use them: the engines then compute the tokens again. This
    command never lists or clears a store. Exit code 1: a value could not be removed."""
    full = full_names(names, prefix)
    there, gone, why = run_job(_options(extra), "drop", full, DEADLINE_S, most_s=2 * DEADLINE_S + SPARE_S)
    if as_json:
        click.echo(json.dumps(dict(zip(full, gone, strict=True)), indent=2))
    else:
        for name, was_there, is_gone in zip(full, there, gone, strict=True):
            how = ("removed" if was_there else "was not there") if is_gone else "NOT REMOVED"
            click.echo(f"{name}: {how}")
    if not all(gone):
        click.echo(f"not removed: {why or 'the store did not say why'}", err=True)
    return 0 if all(gone) else FAILED_EXIT_CODE


def full_names(names: Sequence[str], prefix: str | None) -> list[str]:
    """Returns the complete names of values, each once. A name may be given completely, or as the key that follows
    `prefix`.

    Raises:
        ConfigError: the prefix or a name is not one of flexkv's, or there are more than `MOST_NAMES` names.
    """
    if prefix is not None and PREFIX.fullmatch(prefix) is None:
        raise ConfigError(f"--prefix={prefix!r}: allowed is flexkv/1/OWNER/GROUP, as names of values begin")
    if len(names) > MOST_NAMES:
        raise ConfigError(f"{len(names)} names: at most {MOST_NAMES} at once")
    full = []
    for name in names:
        if KEY.fullmatch(name) and prefix is None:
            raise ConfigError(f"{name}: a key alone names no value: give --prefix flexkv/1/OWNER/GROUP too")
        whole = f"{str(prefix).rstrip('/')}/{name}" if KEY.fullmatch(name) else name
        if NAME.fullmatch(whole) is None:
            raise ConfigError(
                f"{name!r}: no name of a value; allowed is flexkv/1/OWNER/GROUP/KEY, or a KEY of 32 hex digits"
            )
        full.append(whole)
    return list(dict.fromkeys(full))


def _size(text: str) -> int:
    """Returns the bytes that `--bytes` gives.

    Raises:
        ConfigError: `text` is not a size.
    """
    try:
        return int(str(parse_size(text)))
    except ValueError as error:
        raise ConfigError(f"--bytes={text!r}: {error}") from None


def _options(extra: str | None) -> StoreOptions:
    """Returns the options with which a client of the remote tier's store is made.

    Raises:
        ConfigError: a setting is not allowed, or there is no remote tier.
    """
    remote = load_config(parse_extra(extra)).remote
    if not remote.urls:
        raise ConfigError(
            "remote.urls is not set, so there is no remote tier: set it in FLEXKV_CONFIG's file, FLEXKV_REMOTE_URLS or "
            "--extra, as an engine's"
        )
    return store_options(remote)
