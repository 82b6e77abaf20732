"""`flexkv config`: shows the settings and where each value came from, and prints their reference and sample files."""

from __future__ import annotations

import json
import os

import click
from rich.table import Table

from flexkv.cli.tables import print_table
from flexkv.config import FlexKVConfig, SettingRow, load_config
from flexkv.config.engines import markdown_engines
from flexkv.config.names import ALIASES
from flexkv.config.samples import SAMPLES, sample_text
from flexkv.config.sizes import format_size
from flexkv.config.sources import OTHER_VARIABLES
from flexkv.errors import ConfigError


@click.group()
def command() -> None:
    """Show or document the settings."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--extra",
    metavar="JSON",
    help="The engine's extra config, as you would pass it in kv_connector_extra_config.",
)
def show(as_json: bool, extra: str | None) -> None:
    """Print every setting with its value and the value's source."""
    config = load_config(parse_extra(extra))
    rows = list(config.rows())
    if as_json:
        values = {row.key: {"value": row.value, "origin": row.origin} for row in rows}
        click.echo(json.dumps(values, indent=2))
        return
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for row in rows:
        style = "dim" if row.origin == "default" else ""
        table.add_row(row.key, show_value(row), row.origin, style=style)
    print_table(table)


@command.command()
def docs() -> None:
    """Print the reference of all settings in Markdown."""
    click.echo(markdown_reference())


@command.command()
def samples() -> None:
    """List the sample files that `flexkv config sample` prints."""
    table = Table("sample", "what it is", box=None, pad_edge=False)
    for name, what in SAMPLES.items():
        table.add_row(name, what)
    print_table(table)


@command.command()
@click.argument("name")
def sample(name: str) -> None:
    """Print one sample file: flexkv's settings, or the configuration with which an engine attaches flexkv."""
    click.echo(sample_text(name), nl=False)


def show_value(row: SettingRow) -> str:
    """Returns a setting's value as text for people: "unset" for None, sizes also in binary units."""
    if row.value is None or row.value == ():
        return "unset"
    if isinstance(row.value, tuple):
        if all(isinstance(item, str) for item in row.value):
            return os.pathsep.join(row.value)
        return json.dumps(row.value)  # not all are strings: some are lists of token ids
    if row.value == "":
        return '""'
    if isinstance(row.value, bool):
        return str(row.value).lower()
    if isinstance(row.value, int) and row.key.rsplit(".", 1)[-1].startswith(("bytes", "extent_bytes")):
        return f"{row.value} ({format_size(row.value)})"
    return str(row.value)


def markdown_reference() -> str:
    """Returns the settings, aliases and other variables as Markdown tables. docs/configuration.md has this text."""
    lines = ["| setting | environment | default | meaning |", "|---|---|---|---|"]
    for row in FlexKVConfig().rows():
        lines.append(f"| `{row.key}` | `{row.environment_name}` | {show_value(row)} | {row.description} |")
    lines += [
        "",
        "Some engines do not use the following settings; flexkv logs a warning if one is given. Every engine uses all "
        "others:",
        "",
    ]
    lines += [markdown_engines()]
    lines += ["", "flexkv accepts these names of other systems in every source:", ""]
    lines += ["| name | setting | value |", "|---|---|---|"]
    lines += [f"| `{name}` | `{alias.key}` | {alias.meaning} |" for name, alias in ALIASES.items()]
    lines += ["", "These variables have the same prefix but are not settings:", ""]
    lines += ["| variable | use |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in OTHER_VARIABLES.items()]
    return "\n".join(lines)


def parse_extra(text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        extra = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--extra: not valid JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError("--extra: lists or mappings in each other, too many to read") from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra: expected a JSON object of settings, got {text[:80]!r}")
    return extra
