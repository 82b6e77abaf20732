"""Every failed op is logged with one line. If many ops fail at once, the log has a few of these lines, and the number
of the others."""

from __future__ import annotations

import threading

import pytest

from flexkv.observe import FailedOps, get_logger
from flexkv.observe.failed_ops import MOST_LINES, PERIOD_S

LOGGER = get_logger("flexkv.test_failed_ops")
LOAD, STORE = "load from host memory", "store to host memory"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == LOGGER.name]


def test_a_failure_is_a_warning_that_names_op_way_pages_and_reason(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    FailedOps(LOGGER, clock).warn(LOAD, "op 19 of request r-1", 3, 18, "rank 0: past load.deadline_s")
    assert lines(caplog) == [
        "load from host memory, op 19 of request r-1: 3 of 18 pages failed: rank 0: past load.deadline_s"
    ]
    assert caplog.records[0].levelname == "WARNING"


def test_a_failure_without_a_reason_is_a_line_too(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    FailedOps(LOGGER, clock).warn(LOAD, "op 1", 1, 1, "")
    assert lines(caplog)[0].endswith("no reason was given")


def test_a_storm_is_a_few_lines_and_a_count_of_the_rest(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    failed = FailedOps(LOGGER, clock)
    for op in range(5_000):
        failed.warn(LOAD, f"op {op}", 2, 4, "why")
    assert len(lines(caplog)) == MOST_LINES
    failed.warn(STORE, "op 5000", 1, 1, "why")
    assert len(lines(caplog)) == MOST_LINES + 1, "another kind is not hidden by it"
    failed.flush()
    assert len(lines(caplog)) == MOST_LINES + 1, "the period is not over"
    clock.now_s += PERIOD_S
    failed.flush()
    assert lines(caplog)[MOST_LINES + 1 :] == [
        f"load from host memory: 4990 more failed, 9980 pages, within 60 s of the {MOST_LINES} that were named"
    ]
    failed.flush()
    failed.flush(at_end=True)
    assert len(lines(caplog)) == MOST_LINES + 2, "said once"


def test_the_next_period_names_failures_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    failed = FailedOps(LOGGER, clock)
    for op in range(MOST_LINES + 1):
        failed.warn(LOAD, f"op {op}", 1, 1, "why")
    clock.now_s += PERIOD_S + 1
    failed.warn(LOAD, "op 77", 1, 1, "why")
    assert "1 more failed, 1 pages" in lines(caplog)[-2]
    assert "op 77" in lines(caplog)[-1]


def test_at_the_end_what_was_left_out_is_said(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    failed = FailedOps(LOGGER, clock)
    for op in range(MOST_LINES + 7):
        failed.warn(LOAD, f"op {op}", 1, 1, "why")
    failed.flush(at_end=True)
    assert "7 more failed" in lines(caplog)[-1]


def test_threads_count_together(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    failed = FailedOps(LOGGER, clock)

    def fail() -> None:
        for op in range(200):
            failed.warn(LOAD, f"op {op}", 1, 1, "why")

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed.flush(at_end=True)
    assert len(lines(caplog)) == MOST_LINES + 1
    assert f"{800 - MOST_LINES} more failed" in lines(caplog)[-1]
