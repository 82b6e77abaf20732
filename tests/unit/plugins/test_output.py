"""A plugin's output is logged line by line. Long lines are cut, unprintable characters are replaced, and the rate of
lines is limited. Lost lines are counted.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexkv.plugins.base import Program, Times
from flexkv.plugins.keeper.output import (
    BURST_LINES,
    LINE_BYTES,
    LINES_PER_S,
    MOST_SHOWN_BYTES,
    OutputLines,
    TokenBucket,
    printable,
)
from flexkv.plugins.keeper.run import PluginRun


def test_lines_pass_whole_however_they_come() -> None:
    output = OutputLines(0.0)
    assert output.take(b"one\ntw", 0.0) == ["one"]
    assert output.take(b"o\n\nthree", 0.0) == ["two", ""]
    assert output.end(0.0) == ["three"]
    assert output.end(0.0) == []


def test_a_flood_loses_lines_with_their_count() -> None:
    output = OutputLines(0.0)
    passed = output.take(b"x\n" * 10_000, 0.0)
    assert passed == ["x"] * BURST_LINES
    later = output.take(b"y\n", 1 / LINES_PER_S)
    assert later == [f"({10_000 - BURST_LINES} lines were lost: more than 10 per second)", "y"]
    assert output.end(1.0) == []


def test_lines_lost_last_are_counted_at_the_end() -> None:
    output = OutputLines(0.0)
    output.take(b"x\n" * (BURST_LINES + 7), 0.0)
    assert output.end(0.0) == ["(7 lines were lost: more than 10 per second)"]


def test_a_line_without_an_end_takes_bounded_memory_and_passes_once() -> None:
    output = OutputLines(0.0)
    lines = [line for _ in range(100) for line in output.take(b"z" * 10_000, 0.0)]
    assert lines == ["z" * LINE_BYTES + " ..."]
    assert len(output._begun) <= LINE_BYTES
    assert output.take(b"zz\nnext\n", 0.0) == ["next"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain", "plain"),
        (b"\x1b[31mred\r", "?[31mred"),
        (b"tab\there", "tab here"),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        ("next\u2028line".encode(), "next?line"),
    ],
)
def test_nothing_in_a_line_acts_on_a_terminal(line: bytes, text: str) -> None:
    assert printable(line) == text


@pytest.mark.parametrize("line", [b"\t" * LINE_BYTES, b"\xff" * LINE_BYTES])
def test_a_shown_line_stays_below_what_the_engine_reads_at_once(line: bytes) -> None:
    assert (
        len(printable(line).encode()) <= MOST_SHOWN_BYTES < 4096 - 2 * 256
    )  # the limit leaves space for the level, the name and the line end


def test_the_last_words_of_a_chatty_plugin_pass_and_nothing_is_read_after_them(tmp_path: Path) -> None:
    """The last line of a plugin is logged, even if the plugin has used up its rate of lines when it ends. Nothing is
    read from it afterwards."""
    said: list[str] = []
    program = Program("all_chatty", ("/bin/sh", "-c", "echo last words"))
    run = PluginRun(program, str(tmp_path), Times(), lambda level, name, line: said.append(line), 0.0)
    run.start(0.0)
    os.waitpid(run.pid, 0)
    while run._reads.take(0.0):
        pass
    run.read(0.0)
    assert run.reads_at_s > 0.0, "it waits"
    run.ended(0, 0.0)
    assert "last words" in said
    assert (run.reads_at_s, run.output) == (0.0, -1)


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, 3, 0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s() == 0.5
    assert [bucket.take(0.5), bucket.take(0.5)] == [True, False]
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False], (
        "no more than the burst is saved"
    )


def test_pauses_double_up_to_the_longest_and_start_over_after_a_long_run() -> None:
    times, pause_s, pauses = Times(1.0, 10.0), 0.0, []
    for _ in range(6):
        pause_s = times.pause_after(pause_s, ran_s=0.1)
        pauses.append(pause_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert times.pause_after(pause_s, ran_s=10.0) == 1.0
