"""Blending inside vLLM with segments that are read from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.model import PRESETS, write_model

from .blend_world import Documents, results, start_blending
from .conftest import Engines
from .session import Answer, EngineSession, Prompt
from .test_disk import flip, slabs_of

ROUNDING = 1e-4
READ = "vllm:flexkv_blend_disk_pages_total{direction=read}"
MISSED = "vllm:flexkv_blend_missed_pages_total"
PAGES = 19
"""Number of pages of 16 tokens in all three documents: 6 + 5 + 8."""
PAGE_BYTES = 2 * 16 * PRESETS["tiny"].layers * PRESETS["tiny"].kv_heads * PRESETS["tiny"].head_size * 4
NOTHING_HELD = {"live": 0, "pages": 0, "loads": 0, "staged": 0}
WAIT_S = 0.5


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "disk.folders": str(folder),
        "disk.bytes_per_folder": 64 << 20,
        "disk.wait_s": 20.0,
        "blend.disk_bytes": 32 << 20,
    } | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


@pytest.fixture
def session(engines: Engines, folder: Path) -> EngineSession:
    return start_blending(engines, settings(folder))


@pytest.fixture
def documents(session: EngineSession, stream: int) -> Documents:
    """Returns documents whose segments are on disk, but not in host memory."""
    made = Documents.of(stream % 10_000_000)
    made.store(session)
    drop_host(session)
    return made


def drop_host(session: EngineSession) -> None:
    session.settle()
    assert session.call("blend_drop_host")["left"] == 0


def missed(session: EngineSession) -> dict[str, float]:
    found = session.process.metrics(MISSED)
    return {key.partition("reason=")[2].rstrip("}"): value for key, value in found.items() if value}


def more(of: Callable[[EngineSession], dict[str, float]], session: EngineSession, before: Any) -> Any:
    return dict(Counter(of(session)) - Counter(before))


def test_segments_from_disk_give_the_bits_of_those_from_host_memory(
    session: EngineSession, documents: Documents
) -> None:
    before, read = missed(session), session.metric(READ)
    [from_disk] = session.ask(documents.blended(0.15))
    assert session.metric(READ) - read == PAGES
    [from_memory] = session.ask(documents.blended(0.15))
    assert session.metric(READ) - read == PAGES
    [full] = session.ask(documents.plain())
    assert (from_disk.tokens, from_disk.log_probabilities) == (
        from_memory.tokens,
        from_memory.log_probabilities,
    )
    assert from_disk.log_probabilities != full.log_probabilities, "rows are reused"
    assert more(missed, session, before) == {}
    assert session.call("blend_held") == NOTHING_HELD


def test_kept_rows_beside_rows_from_disk_get_the_keys_of_the_full_computation(
    session: EngineSession, stream: int
) -> None:
    """Kept rows get the keys of the full computation if the other rows come from disk and are those of the full
    computation. There are two controls: kept rows that attend as one causal sequence, and rows on disk that were
    computed without the text before them.
    """
    true, alone = (Documents.of(stream % 10_000_000 + number) for number in (0, 100))
    spans = [list(span) for span in true.spans]
    session.call("blend_store_true", full=true.plain().wire(), spans=spans)
    alone.store(session)
    found = []
    for documents, one_sequence in ((true, False), (true, True), (alone, False)):
        drop_host(session)
        read = session.metric(READ)
        asks = {"full": documents.plain().wire(), "blended": documents.blended(0.15).wire()}
        found.append(session.call("blend_oracle", share=0.2, loaded=True, one_sequence=one_sequence, **asks))
        assert session.metric(READ) - read == PAGES
    assert found[0]["runs"] > 30, "the kept rows are apart"
    assert found[0]["worst"] < ROUNDING
    assert found[1]["worst"] > 0.1
    assert found[2]["worst"] > 0.1


STORED = "vllm:flexkv_moved_pages_total{direction=store}"


def only_disk(session: EngineSession) -> None:
    """Drops the engine's own prefix cache, and every page in flexkv's host memory."""
    session.forget()
    assert session.call("drop_host")["left"] == 0


@pytest.mark.parametrize("stored", [False, True], ids=["", "control"])
def test_the_tiers_give_no_other_request_anything_of_a_blended_one(
    session: EngineSession, documents: Documents, stored: bool
) -> None:
    """No tier serves pages of a blended prompt to another request, because flexkv stores them neither in host memory
    nor on disk. The control stores them like those of an ordinary request. A later request then loads them from disk,
    and its answer differs from the full computation.
    """
    [full] = session.ask(documents.plain())
    only_disk(session)
    had = session.metric(STORED)
    if stored:
        session.call("blend_stored", request=documents.blended(0.0, salt="").wire())
    else:
        blended = documents.blended(0.0)
        session.ask(blended)
        session.settle()
        assert session.metric(STORED) == had
    only_disk(session)
    if stored:
        assert session.metric(STORED) > had
        [answer] = session.ask(documents.plain(salt=""))
        assert answer.cached > 0
        assert answer.log_probabilities != pytest.approx(full.log_probabilities, abs=10 * ROUNDING)
        assert session.call("reset", connector=True)["done"]
        return
    assert session.check_one(documents.plain(salt=blended.salt)).cached == 0
    only_disk(session)
    assert session.check_one(documents.plain(salt="")).cached == 0
    only_disk(session)
    answer = session.check_one(documents.plain(salt=""))
    assert answer.cached > 0, "an ordinary one's pages come from disk"
    assert answer.log_probabilities == pytest.approx(full.log_probabilities, abs=ROUNDING)


def test_damaged_segments_on_disk_are_computed(
    session: EngineSession, documents: Documents, folder: Path
) -> None:
    for slab in slabs_of(folder):
        if "segments-" in str(slab):
            flip(slab, range(64 << 10, slab.stat().st_size, 4096))
    before, count = results(session), missed(session)
    session.check_one(documents.blended(0.0))
    assert more(results, session, before) == {"lost": 1}
    assert more(missed, session, count) == {"unreadable": PAGES}
    documents.store(session)
    drop_host(session)
    session.check_one(documents.blended(1.0))
    assert more(results, session, before) == {"lost": 1, "stored": 3, "blended": 1}


def test_the_next_process_finds_them(engines: Engines, stream: int, tmp_path: Path) -> None:
    """Segments on disk survive a kill of the engine. The next process uses them, but only for the same rank and
    namespace."""
    first = start_blending(engines, settings(tmp_path))
    documents = Documents.of(stream % 10_000_000)
    documents.store(first)
    [before] = first.ask(documents.blended(0.15))
    first.settle()
    first.process.kill()
    second = start_blending(engines, settings(tmp_path))
    [after] = second.ask(documents.blended(0.15))
    assert (after.tokens, after.log_probabilities) == (before.tokens, before.log_probabilities)
    assert second.metric(READ) == PAGES
    other = documents.blended(0.0)
    assert other.extra is not None
    other.extra["kv_transfer_params"]["flexkv.namespace"] = "another"
    second.check_one(other)
    assert results(second) == {"blended": 1, "miss": 1}
    assert missed(second) == {"absent": PAGES}
    assert second.call("reset", connector=True)["done"]
    second.check_one(documents.blended(0.0))
    assert results(second) == {"blended": 1, "miss": 2}


def test_a_disk_that_hangs_costs_its_requests_the_segments_and_nobody_a_step(
    engines: Engines, folder: Path, stream: int
) -> None:
    session = start_blending(engines, settings(folder, **{"disk.wait_s": WAIT_S}))
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)
    drop_host(session)
    session.call("blend_hold_reads")
    # The blended request is aborted while it waits for its segments. Meanwhile the other request is served.
    reply = session.call(
        "abort",
        requests=[documents.blended(0.0).wire(), Prompt.of(77, stream, salt="other").wire()],
        victim=0,
        steps=5,
    )
    assert reply["aborted"], reply
    assert len(reply["requests"][1]["tokens"]) == 12
    assert session.call("blend_held") == NOTHING_HELD
    before, count = results(session), missed(session)
    blended, other = session.check(documents.blended(0.0), Prompt.of(78, stream, salt="another"))
    assert more(results, session, before) == {"late": 1}
    assert more(missed, session, count) == {"late": PAGES}
    assert blended.ttft_s is not None
    assert other.ttft_s is not None
    assert other.ttft_s < blended.ttft_s
    session.call("blend_let_reads_go")
    session.settle()
    assert session.call("blend_held") == NOTHING_HELD
    session.check_one(documents.blended(1.0))
    assert more(results, session, before) == {"late": 1, "blended": 1}


LAST_RANGE = 3
"""The first layer of the last range of layers. A page of 8 layers is read in several such ranges."""


def test_a_forward_begins_while_the_last_layers_of_its_segments_are_read(
    engines: Engines, tmp_path: Path, stream: int
) -> None:
    """With `disk.stream`, a forward pass begins while the last layers of its segments are still being read. The test
    blends twice, the second time with a bit flipped in a page's last range of layers. The forward pass then begins
    again without the damaged segment, and the answer is as if the request had not listed it.
    """
    folder = tmp_path / "segments"
    session = start_blending(
        engines,
        settings(folder, **{"disk.stream": True, "blend.bytes": 64 << 20}),
        {"SEGMENT_FAULTS": "1"},
        model=str(write_model(tmp_path, "medium")),
    )
    documents = Documents.of(stream % 10_000_000)
    documents.store(session)

    def blend(damaged: bool) -> tuple[Answer, list[int]]:
        drop_host(session)
        wire, segment = documents.blended(0.15).wire(), documents.segments[1]
        found = session.call(
            "blend_streamed",
            request=wire,
            segment=segment,
            folder=str(folder),
            layer=LAST_RANGE,
            damaged=damaged,
        )
        assert found["moved"] == [True], "the last range was still being read"
        return Answer.of(found["requests"][0]), found["ran"]

    layers = list(range(8))
    streamed, ran = blend(damaged=False)
    assert ran[:16] == layers * 2, "the prompt once, and the second token"
    [from_memory] = session.ask(documents.blended(0.15))
    [without] = session.ask(documents.blended(0.15, [documents.spans[0], documents.spans[2]]))
    assert (streamed.tokens, streamed.log_probabilities) == (
        from_memory.tokens,
        from_memory.log_probabilities,
    )
    assert without.log_probabilities != streamed.log_probabilities
    damaged, ran = blend(damaged=True)
    assert ran[: LAST_RANGE + 8] == layers[:LAST_RANGE] + layers
    assert (damaged.tokens, damaged.log_probabilities) == (without.tokens, without.log_probabilities)
    assert session.metric("vllm:flexkv_blend_lost_segments_total") == 1
    assert missed(session) == {"unreadable": 5}
    session.settle()
    assert session.call("blend_held") == NOTHING_HELD


@pytest.mark.long
def test_preempted_requests_get_their_segments_from_disk_again(
    engines: Engines, folder: Path, stream: int
) -> None:
    """A preempted blended request reads its segments from disk again. Three blended prompts run out of blocks while
    they generate, and host memory has slots for one prompt's segments only."""
    session = start_blending(engines, settings(folder, **{"blend.bytes": 60 * PAGE_BYTES}))
    several = [
        Documents.of(stream % 10_000_000 + 100 * number, (600, 400, 250), max_tokens=120)
        for number in range(3)
    ]
    for each in several:
        each.store(session)
        session.settle()
    read, preemptions = session.metric(READ), session.metric("vllm:num_preemptions_total")
    session.check(*(each.blended(1.0) for each in several))
    assert session.metric("vllm:num_preemptions_total") > preemptions
    assert session.metric(READ) > read
    session.settle()
    assert session.call("blend_held") == NOTHING_HELD
