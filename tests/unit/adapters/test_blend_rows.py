"""Tests which rows of a batch belong to a request, which of them are kept for computing, and how kept rows are grouped
into runs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexkv.adapters.vllm.blend.rows import BatchRows, Runs, kept_rows
from flexkv.adapters.vllm.blend.worker import run_rows_of
from flexkv.config import BlendConfig


def batch_of(*sequences: tuple[int, int, int]) -> BatchRows:
    """Makes a batch of sequences, each given as (first slot, first position, number of rows)."""
    lengths = [rows for _, _, rows in sequences]
    return BatchRows(
        np.cumsum([0, *lengths]).astype(np.int64),
        np.concatenate([np.arange(slot, slot + rows) for slot, _, rows in sequences]),
        np.concatenate([np.arange(first, first + rows) for _, first, rows in sequences]),
    )


BATCH = batch_of((320, 10, 4), (64, 0, 6), (700, 33, 1))


def test_a_request_is_found_wherever_it_stands_in_the_batch() -> None:
    assert BATCH.place(0, np.arange(64, 70)) == 4
    assert BATCH.place(10, np.arange(320, 324)) == 0
    assert BATCH.place(33, np.arange(700, 701)) == 10


@pytest.mark.parametrize(
    ("first", "slots"),
    [
        (0, np.arange(64, 69)),
        (0, np.arange(64, 71)),
        (1, np.arange(65, 70)),
        (5, np.arange(64, 70)),
        (0, np.arange(900, 906)),
        (0, np.arange(0)),
    ],
    ids=["fewer rows", "more rows", "from the middle", "other positions", "other slots", "none"],
)
def test_rows_that_are_not_exactly_there_are_not_found(first: int, slots: np.ndarray) -> None:
    assert BATCH.place(first, slots) is None


def test_the_most_different_rows_and_the_last_ones_are_kept() -> None:
    difference = np.array([0, 5, 0, 0, 9, 1, 8, 2, 3, 0, 0], np.float64)
    covered = np.arange(4, 10)
    keep = kept_rows(BATCH, [(covered, 0.34)], difference)
    assert np.flatnonzero(keep).tolist() == [0, 1, 2, 3, 4, 6, 9, 10], (
        "two of six, and the sequence's last row"
    )
    everything = kept_rows(BATCH, [(covered, 1.0)], difference)
    assert everything.all()
    nothing = kept_rows(BATCH, [(covered, 0.0)], difference)
    assert np.flatnonzero(~nothing).tolist() == [4, 5, 6, 7, 8]


def test_each_request_has_a_share_of_its_own() -> None:
    difference = np.array([1, 2, 3, 4, 50, 60, 70, 80, 90, 0, 0], np.float64)
    keep = kept_rows(BATCH, [(np.arange(3), 0.34), (np.arange(4, 9), 0.2)], difference)
    assert np.flatnonzero(keep[:4]).tolist() == [2, 3]
    assert np.flatnonzero(keep[4:9]).tolist() == [4]


def test_rows_are_kept_in_runs_of_neighbours_of_one_request() -> None:
    batch = batch_of((0, 0, 10), (64, 10, 10))
    difference = np.zeros(20)
    difference[[3, 11]] = 9, 8
    # The covered rows of the two requests, 2 to 9 and 10 to 17, are adjacent in the batch.
    keep = kept_rows(batch, [(np.arange(2, 10), 0.25), (np.arange(10, 18), 0.25)], difference, run_rows=4)
    assert np.flatnonzero(keep).tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 18, 19]
    runs = Runs.of(batch, np.flatnonzero(keep))
    assert runs.lengths.tolist() == [6, 10, 14, 20]


@pytest.mark.parametrize(
    ("given", "device", "rows"), [(None, "cpu", 1), (None, "cuda:0", 16), (5, "cpu", 5), (1, "cuda", 1)]
)
def test_runs_are_longer_on_a_gpu_unless_a_length_is_given(given: int | None, device: str, rows: int) -> None:
    assert run_rows_of(BlendConfig(run_tokens=given), torch.device(device)) == rows


def test_consecutive_rows_of_a_request_are_one_run() -> None:
    runs = Runs.of(BATCH, np.array([0, 1, 3, 4, 6, 7, 9, 10]))
    assert runs.starts.tolist() == [0, 2, 3, 4, 6, 7, 8]
    assert runs.lengths.tolist() == [12, 14, 1, 4, 6, 34]
    assert runs.sequences.tolist() == [0, 0, 1, 1, 1, 2]


def test_all_rows_are_the_engines_own_sequences() -> None:
    runs = Runs.of(BATCH, np.arange(11))
    assert runs.starts.tolist() == BATCH.starts.tolist()
    assert runs.lengths.tolist() == [14, 6, 34]


def test_requests_whose_positions_follow_each_other_are_two_runs() -> None:
    batch = batch_of((0, 0, 3), (64, 3, 2))
    assert Runs.of(batch, np.arange(5)).lengths.tolist() == [3, 5]


def test_an_empty_sequence_has_no_last_row() -> None:
    batch = BatchRows(np.array([0, 3, 3], np.int64), np.arange(3), np.arange(3))
    assert batch.last.tolist() == [2]
