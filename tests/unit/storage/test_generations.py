"""Each write gets a generation that no other write has, neither in the same opening of a folder nor in another one."""

from __future__ import annotations

import numpy as np
import pytest

from flexkv.errors import CapacityError
from flexkv.storage.generations import MOST_OPENS, GenerationCounter, opens_of


def test_no_number_is_given_twice_in_an_open() -> None:
    counter = GenerationCounter(3)
    taken = np.concatenate([counter.take(count) for count in (1, 5, 0, 2)])
    assert len(np.unique(taken)) == len(taken) == 8
    assert opens_of(taken) == 3


def test_numbers_of_a_later_open_are_higher() -> None:
    assert GenerationCounter(2).take(1).min() > GenerationCounter(1).take(100_000).max()


def test_numbers_end_where_those_of_the_next_open_begin() -> None:
    counter = GenerationCounter(1)
    counter._next = counter._end - 2
    assert opens_of(counter.take(2)) == 1
    with pytest.raises(CapacityError, match="no generation is left"):
        counter.take(1)


@pytest.mark.parametrize("opens", [0, MOST_OPENS + 1])
def test_more_opens_than_there_are_numbers_for_are_refused(opens: int) -> None:
    with pytest.raises(CapacityError, match=f"this would be number {opens}"):
        GenerationCounter(opens)
