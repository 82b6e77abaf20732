"""Ops and questions that a unit sends to its helper. The test takes the place of the helper. Each op and each question
ends exactly once, at the right time.
"""

from __future__ import annotations

import pickle
import socket
from collections import Counter

import numpy as np
import pytest

from flexkv.errors import ContractError, StoreError
from flexkv.remote.base import Presence
from flexkv.remote.breaker import BreakerState
from flexkv.remote.link import ALIVE_S, START_S
from flexkv.remote.messages import (
    MOST_PAGES,
    PACKET_BYTES,
    Alive,
    Answer,
    Done,
    Get,
    Put,
    Ready,
    Refused,
    Remove,
    receive,
    send,
)
from flexkv.remote.plane import LOST, MOST_REMOVALS
from flexkv.transfer.graph import FailureCause, OpId, OpKind, OpStatus
from tests.unit.remote.fake_helper import STUCK_S, PlayedPlane, not_executed, op_of
from tests.unit.remote.remote_unit import chain

YES = np.full(4, Presence.YES, np.uint8).tobytes()


@pytest.fixture
def played() -> PlayedPlane:
    return PlayedPlane()


def test_op_ends_when_its_last_message_has(played: PlayedPlane) -> None:
    pages = 2 * MOST_PAGES + 10
    first, second, third = played.get(1, pages)
    played.done(third, [9], ok=10)
    played.done(first, [], ok=MOST_PAGES)
    assert played.plane.poll() == []
    played.done(second, [0, 5], ok=MOST_PAGES, cause=FailureCause.SOURCE)
    (result,) = played.plane.poll()
    assert result.status is OpStatus.FAILED
    assert result.failed.tolist() == [MOST_PAGES, MOST_PAGES + 5, 2 * MOST_PAGES + 9]
    assert result.causes.tolist() == [FailureCause.SOURCE, FailureCause.SOURCE, FailureCause.CONTENT]
    assert played.plane.totals.gets["ok"] == pages - 3
    sent = played.helper.all_of(Get)
    assert np.array_equal(np.concatenate([message.keys for message in sent]), chain(1, pages))
    assert np.array_equal(np.concatenate([message.slots for message in sent]), np.arange(pages))
    assert np.array_equal(np.concatenate([message.tokens for message in sent]), np.arange(1, pages + 1))


def test_results_come_in_any_order(played: PlayedPlane) -> None:
    (first,), (second,), (third,) = played.get(1), played.put(2), played.get(3)
    for number in (third, second, first):
        played.done(number)
    assert [result.op_id for result in played.plane.poll()] == [3, 2, 1]
    assert (played.plane.totals.gets["ok"], played.plane.totals.puts["ok"]) == (6, 3)


def test_nothing_of_a_cancelled_op_was_executed(played: PlayedPlane) -> None:
    (number,) = played.get(1)
    played.done(number, [0, 1, 2], cause=FailureCause.NOT_EXECUTED)
    (result,) = played.plane.poll()
    assert result.status is OpStatus.CANCELLED
    assert result.page_causes(3).tolist() == not_executed(3).tolist()


def test_full_queue_takes_all_ops_of_a_graph_or_none(played: PlayedPlane) -> None:
    assert played.submit(*(op_of(number, OpKind.DISK_READ) for number in range(3)))
    assert not played.submit(op_of(3, OpKind.DISK_READ), op_of(4, OpKind.DISK_READ))
    assert len(played.helper.all_of(Get)) == 3
    assert played.submit(op_of(3, OpKind.DISK_READ))
    played.done(played.helper.all_of(Get)[0].number)
    assert len(played.plane.poll()) == 1
    assert played.submit(op_of(4, OpKind.DISK_WRITE))


def test_op_of_another_kind_is_an_error(played: PlayedPlane) -> None:
    with pytest.raises(ContractError, match="H2D"):
        played.submit(op_of(0, OpKind.DISK_READ), op_of(1, OpKind.H2D))
    assert not played.helper.all_of(Get)


def test_long_get_that_shows_progress_stays(played: PlayedPlane) -> None:
    (number,) = played.get(1)
    for _ in range(10):
        played.progress(number)
        played.after(0.9 * STUCK_S)
    assert not played.helper.was_killed
    assert played.link.usable


@pytest.mark.parametrize("other", ["answers", "puts"])
def test_silent_get_is_killed_though_others_show_life(played: PlayedPlane, other: str) -> None:
    played.get(1)
    (busy,) = played.put(2)
    for asked in range(3):
        if other == "answers":
            played.helper.says.append(Answer(played.ask(10 + asked), (YES,)))
        played.progress(busy)
        played.after(0.4 * STUCK_S)
    assert played.helper.was_killed
    assert not played.link.usable


def test_control_get_that_just_began_is_not_silent(played: PlayedPlane) -> None:
    played.after(10 * STUCK_S)
    played.get(1)
    played.after(0.9 * STUCK_S)
    assert not played.helper.was_killed


def test_process_that_answers_no_question_is_killed(played: PlayedPlane) -> None:
    """A helper that never answers a question is killed. A request waits for an answer only until its time limit, so
    this helper would delay every request by that time."""
    played.ask(1)
    played.after(0.1)
    assert [(op_id, len(found)) for op_id, found in played.plane.answers()] == [(1, 0)]
    assert played.plane.totals.lookups == {"unknown": 1}
    for number in range(8):
        played.ask(2 + number)
        played.after(STUCK_S / 8)
        assert len(played.plane.answers()) == 1
    assert played.helper.was_killed


def test_control_late_answers_are_a_sign_of_life_and_no_answer(played: PlayedPlane) -> None:
    for number in range(10):
        asked = played.ask(number)
        played.after(STUCK_S / 2)
        assert played.plane.answers() == [(number, ())]
        played.helper.says.append(Answer(asked, (YES,)))
        played.plane.poll()
        assert played.plane.answers() == []
    assert not played.helper.was_killed
    assert played.plane.totals.lookups == {"unknown": 10}


def test_ops_of_a_killed_process_end_when_it_is_reaped(played: PlayedPlane) -> None:
    played.get(1)
    played.put(2)
    played.after(STUCK_S + 0.1)
    assert played.helper.was_killed
    for _ in range(20):
        played.after(1.0)
        assert played.plane.poll() == [], "the process may write to the op's slots still"
    assert len(played.helpers) == 1, "no other one beside it"
    played.end()
    results = played.plane.poll()
    assert [(result.op_id, result.status) for result in results] == [(1, OpStatus.CANCELLED), (2, 2)]
    assert "signal 9" in results[0].reason


def test_messages_of_an_ended_process_are_ignored(played: PlayedPlane) -> None:
    (first,) = played.get(1)
    asked = played.ask(2)
    played.end()
    assert len(played.plane.poll()) == 1
    assert played.plane.answers() == [(2, ())]
    played.after(2.0)
    assert len(played.helpers) == 2
    played.answer_alive()
    played.done(first)
    played.progress(first)
    played.helper.says.append(Answer(asked, (YES,)))
    assert played.plane.poll() == []
    assert played.plane.answers() == []
    assert played.plane.totals.gets == {LOST: 3}


def test_every_page_of_a_lost_process_is_counted_once(played: PlayedPlane) -> None:
    """If the helper is lost during an op, each page of the op is counted once. One message of the op has been
    completed, one completed partly, and one not at all."""
    first, second, _ = played.get(1, 3 * MOST_PAGES)
    played.put(2, 5)
    played.done(first, ok=MOST_PAGES)
    early = np.arange(4, MOST_PAGES, dtype=np.int32)
    played.helper.says.append(Done(second, early, not_executed(len(early)), Counter(ok=4), "cancelled"))
    played.plane.poll()
    played.end()
    played.plane.poll()
    assert played.plane.totals.gets == Counter({"ok": MOST_PAGES + 4, LOST: 2 * MOST_PAGES - 4})
    assert played.plane.totals.puts == {LOST: 5}
    played.submit(op_of(3, OpKind.DISK_READ))
    assert played.plane.totals.gets[LOST] == 2 * MOST_PAGES - 1


def test_cancel_ends_what_waits_and_what_moves_ends_by_itself(played: PlayedPlane) -> None:
    first, second = played.get(1)[0], played.put(2)[0]
    asked = played.ask(3)
    played.done(first, [0, 1, 2], cause=FailureCause.SOURCE, lost="no connection")
    (result,) = played.plane.poll()
    assert result.page_causes(3).tolist() == [FailureCause.SOURCE] * 3
    assert played.plane.down_reason == "no connection"
    assert played.cancelled_up_to() == max(second, asked)
    assert played.plane.answers() == [(3, ())]
    played.done(second, [0, 1, 2], cause=FailureCause.NOT_EXECUTED)
    assert [result.status for result in played.plane.poll()] == [OpStatus.CANCELLED]


def test_open_breaker_sends_nothing(played: PlayedPlane) -> None:
    played.link.lost("gone")
    sent = len(played.helper.got)
    assert played.submit(op_of(1, OpKind.DISK_READ))
    assert [result.status for result in played.plane.poll()] == [OpStatus.CANCELLED]
    assert not played.plane.ask(OpId(2), [chain("asked", 4)], [True])
    played.plane.remove(0, chain("bad", 3))
    assert len(played.helper.got) == sent


def test_lost_store_is_asked_again_after_its_rest(played: PlayedPlane) -> None:
    played.link.lost("gone")
    asked = len(played.helper.all_of(Alive))
    played.after(0.5)
    assert len(played.helper.all_of(Alive)) == asked
    played.after(1.0)
    assert len(played.helper.all_of(Alive)) == asked + 1
    played.helper.says.append(Answer(played.helper.all_of(Alive)[-1].number, lost="still"))
    played.after(0.1)
    assert played.plane.down_reason == "still"
    played.after(3.0)
    played.helper.says.append(Answer(played.helper.all_of(Alive)[-1].number))
    played.after(0.0)
    assert played.link.usable
    assert len(played.helpers) == 1


def test_question_for_life_without_an_answer_ends_the_process(played: PlayedPlane) -> None:
    played.link.lost("gone")
    played.after(1.5)
    played.after(ALIVE_S + 0.1)
    assert played.helper.was_killed


def test_process_that_says_what_is_no_message_is_killed_and_heard_no_more(played: PlayedPlane) -> None:
    (number,) = played.get(1)
    played.helper.says.append(StoreError("a packet that is no message"))
    played.done(number)
    assert played.plane.poll() == []
    assert played.helper.was_killed
    assert "no message" in played.plane.down_reason
    assert played.plane.poll() == [], "what it says after it does not count"
    played.end()
    assert [result.status for result in played.plane.poll()] == [OpStatus.CANCELLED]
    played.after(2.0)
    played.answer_alive()


@pytest.mark.parametrize("packet", [b"garbage", b"\x80\x05.", pickle.dumps(Ready())[:-3]])
def test_bytes_that_are_no_message_are_an_error(packet: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(packet)
        with pytest.raises(StoreError, match="no message"):
            receive(ours)
        send(theirs, Ready())
        assert isinstance(receive(ours), Ready)


def test_message_that_no_packet_holds_is_an_error() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with pytest.raises(StoreError, match=r"Refused of .* is too long"):
            send(ours, Refused("x" * PACKET_BYTES))
        send(ours, Refused("x" * (PACKET_BYTES // 2)))
        assert isinstance(receive(theirs), Refused)


def test_what_is_to_be_removed_waits_for_the_store(played: PlayedPlane) -> None:
    played.plane.remove(0, chain("now", 2))
    played.link.lost("gone")
    for number in range(MOST_REMOVALS + 1):
        played.plane.remove(0, chain(number, 1))
    assert len(played.helper.all_of(Remove)) == 1
    played.after(1.5)
    played.helper.says.append(Answer(played.helper.all_of(Alive)[-1].number))
    played.after(0.1)
    removed = played.helper.all_of(Remove)[1:]
    assert len(removed) == MOST_REMOVALS
    assert np.array_equal(removed[-1].keys, chain(MOST_REMOVALS, 1))


def test_process_that_never_comes_up_is_killed(played: PlayedPlane) -> None:
    played.end()
    played.after(2.0)
    played.after(START_S + 0.1)
    assert played.helper.was_killed
    assert "ready" in played.plane.down_reason


def test_process_that_dies_with_each_first_call_is_started_ever_less_often(played: PlayedPlane) -> None:
    for _ in range(600):
        played.after(1.0)
        if not played.helper.ended:
            if not played.link.usable:
                played.answer_alive()
            played.get(len(played.helpers), 1)
            played.end("its process ended by signal 11")
            assert len(played.plane.poll()) == 1
    assert 6 < len(played.helpers) < 40
    assert played.plane.totals.restarts == len(played.helpers) - 1


def test_values_that_cannot_be_read_open_the_breaker(played: PlayedPlane) -> None:
    for number in range(4):
        played.done(played.get(number)[0], [0, 1, 2], outcome="failed")
        assert len(played.plane.poll()) == 1
    assert played.link.breaker.state is BreakerState.OPEN
    assert "12" in played.plane.down_reason


@pytest.mark.parametrize("outcome", ["absent", "expired", "other_size", "content", "key", "data"])
def test_values_that_are_misses_of_their_keys_leave_the_breaker_alone(
    played: PlayedPlane, outcome: str
) -> None:
    for number in range(12):
        played.done(played.get(number)[0], [0, 1, 2], outcome=outcome)
        assert len(played.plane.poll()) == 1
    assert played.link.usable


def test_message_that_finds_no_room_is_sent_later_and_in_order(played: PlayedPlane) -> None:
    sent = len(played.helper.got)
    played.helper.room = False
    assert played.submit(op_of(1, OpKind.DISK_READ), op_of(2, OpKind.DISK_WRITE))
    assert len(played.helper.got) == sent
    played.helper.room = True
    played.plane.poll()
    assert [type(message) for message in played.helper.got[sent:]] == [Get, Put]


def test_slots_that_a_network_card_may_write_to_stay_out_of_use() -> None:
    played = PlayedPlane(keeps_slots=True)
    played.get(1)
    played.ask(2)
    played.end()
    assert played.plane.poll() == []
    assert played.plane.answers() == [(2, ())]
    assert played.plane.silent_since() is None
    assert played.plane.close(1.0)
    assert played.plane.poll() == []


def test_questions_are_bounded_and_late_ones_count() -> None:
    played = PlayedPlane(questions=2)
    first = played.ask(1)
    played.ask(2)
    assert not played.plane.ask(OpId(3), [chain("asked", 4)], [True])
    played.after(1.0)
    assert len(played.plane.answers()) == 2
    assert not played.plane.ask(OpId(3), [chain("asked", 4)], [True])
    played.helper.says.append(Answer(first, (YES,)))
    played.plane.poll()
    played.ask(3)


def test_close_ends_what_was_in_flight_once_the_process_is_reaped(played: PlayedPlane) -> None:
    played.get(1)
    played.ask(2)
    played.helper.closes = False
    assert not played.plane.close(0.02)
    assert played.plane.poll() == [], "the process was not reaped"
    played.helper.closes = True
    assert played.plane.close(0.02)
    assert [result.status for result in played.plane.poll()] == [OpStatus.CANCELLED]
    assert played.plane.close(0.02)
