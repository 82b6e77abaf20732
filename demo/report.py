"""Shows the results of a run: a table for the terminal, a chart, and JSON for further processing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from demo.conversation import Turn, as_json

LEGEND = """\
turn   phase, then conversation.number
cold   nobody has asked this before; turns 0.1 and 0.2 find their start in the
       engine's own cache
warm   the same prompts, after the engine dropped its own cache
crowd  more conversations in rotation than the engine's pool holds; each turn .1
       continues its turn .0
disk   the cold prompts again, asked of a new engine process: host memory is
       empty, the disk tier is not
TTFT   time to the first token
times  sooner it comes with flexkv, where flexkv served tokens
stored bytes that went to host memory, and from there to disk
loaded bytes that came back into the engine's pool
load   bytes loaded, over the time from asking for them until the engine saw
       them"""
"""Legend of the table and the chart."""

MIB = 1 << 20
GIGA = 1e9


def table(turns: list[Turn], reference: list[Turn]) -> Table:
    """Returns a table with one row per turn. `reference` has the turns of the engine without flexkv."""
    shown = Table(
        title="vLLM with flexkv, beside vLLM alone",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    shown.add_column("turn", no_wrap=True)
    for header in (
        "prompt\ntokens",
        "from\nflexkv",
        "TTFT ms\nalone",
        "TTFT ms\nflexkv",
        "times\nsooner",
        "stored\nMiB",
        "loaded\nMiB",
        "load\nGB/s",
        "same\ntext",
    ):
        shown.add_column(header, justify="right", no_wrap=True)
    phase = turns[0].phase if turns else ""
    for mine, theirs in zip(turns, reference, strict=False):
        if mine.phase != phase:
            shown.add_section()
            phase = mine.phase
        same = mine.answer == theirs.answer
        shown.add_row(
            mine.name,
            f"{mine.prompt_tokens}",
            f"{mine.served}",
            f"{1e3 * theirs.ttft_s:.1f}",
            f"{1e3 * mine.ttft_s:.1f}",
            f"{theirs.ttft_s / mine.ttft_s:.1f}" if mine.served else "-",
            _mib(mine.stored_bytes),
            _mib(mine.loaded_bytes),
            f"{mine.loaded_bytes / mine.load_seconds / GIGA:.2f}" if mine.load_seconds > 0 else "-",
            "[green]yes[/]" if same else "[red]NO[/]",
        )
    return shown


def _mib(size: float) -> str:
    return f"{size / MIB:.1f}" if size else "-"


def draw(turns: list[Turn], reference: list[Turn], path: Path) -> None:
    """Writes a PNG that shows for every turn the time to the first token, and where the prompt's tokens came from."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (times, sources) = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True, constrained_layout=True)
    positions = range(len(turns))
    width = 0.4
    times.bar(
        [p - width / 2 for p in positions], [1e3 * t.ttft_s for t in reference], width, label="vLLM alone"
    )
    times.bar(
        [p + width / 2 for p in positions], [1e3 * t.ttft_s for t in turns], width, label="vLLM with flexkv"
    )
    times.set_title(
        "cold: new prompts; warm: the same, own cache dropped; crowd: too many for it; disk: a new process"
    )
    times.set_ylabel("time to first token, ms")
    times.legend()
    served = [turn.served for turn in turns]
    rest = [turn.prompt_tokens - turn.served for turn in turns]
    sources.bar(positions, served, label="from flexkv", color="tab:green")
    sources.bar(
        positions, rest, bottom=served, label="computed, or in the engine's own cache", color="lightgray"
    )
    sources.set_ylabel("prompt tokens")
    sources.set_xlabel("turn: phase conversation.number")
    sources.set_xticks(list(positions), [turn.name for turn in turns], rotation=60, ha="right")
    sources.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_json(path: Path, facts: dict[str, Any], turns: list[Turn], reference: list[Turn]) -> None:
    content = facts | {
        "turns": [as_json(turn) for turn in turns],
        "without_flexkv": [as_json(turn) for turn in reference],
    }
    path.write_text(json.dumps(content, indent=1))
