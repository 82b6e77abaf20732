"""Prefetches in a real engine: reads from disk begin while a request waits in the engine's queue."""

from __future__ import annotations

from pathlib import Path

from .conftest import Engines
from .session import BLOCK_TOKENS, EngineSession, Prompt
from .test_disk import DISK_HITS, start

PREFETCHED = "vllm:flexkv_disk_prefetched_pages_total"


def read_at_first_asks(
    session: EngineSession, busy: Prompt, queued: Prompt, without_hook: bool = False
) -> list[int]:
    """Sends two prompts at once to an engine that runs one at a time. Only the pages of `queued` are on disk. For each
    prompt, returns the number of pages whose read had begun when the scheduler first looked up the prompt.
    """
    session.forget()
    session.call("drop_host")
    session.call("watch_first_asks", without_hook=without_hook)
    assert [answer.cached for answer in session.check(busy, queued)] == [0, queued.whole_blocks]
    noted = session.call("first_asks")
    session.settle()
    assert noted["all"] == queued.whole_blocks // BLOCK_TOKENS, "each page is read once"
    pages: list[int] = noted["pages"]
    return pages


def test_reads_begin_before_the_scheduler_first_asks(engines: Engines, stream: int, tmp_path: Path) -> None:
    session = start(engines, tmp_path, engine={"max_num_seqs": 1})
    queued = Prompt.of(601, stream)
    pages = queued.whole_blocks // BLOCK_TOKENS
    assert session.check_one(queued).cached == 0
    busy = [Prompt.of(300, stream + n, max_tokens=8) for n in (1, 2)]
    # Both prompts are in the queue before the engine's first step. So the read for the second prompt has begun even
    # before the scheduler looks up the first one.
    assert read_at_first_asks(session, busy[0], queued) == [pages, pages]
    assert session.metric(PREFETCHED) == pages
    assert session.metric(DISK_HITS) == pages, "what was prefetched is the disk's"
    control = read_at_first_asks(session, busy[1], queued, without_hook=True)
    assert control == [0, 0], "the control: nothing is read until the scheduler asks"
    assert session.metric(PREFETCHED) == pages
