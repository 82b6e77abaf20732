"""Pages that move directly between disk and a real SGLang engine's pool, and bypass host memory. Answers are right. A
damaged page ends its request, and the log has the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from demo.sglang_process import PAGE_TOKENS
from tests.engines_sglang.asked import whole
from tests.engines_sglang.conftest import Judge
from tests.engines_sglang.spied import Spied, wait_until_durable
from tests.unit.adapters.disk_engines import spoil

GDS: dict[str, Any] = {
    "disk__gds": "on",
    "disk__gds_may_fail_requests": True,
    "disk__gds_stores": True,
    "disk__compute_if_faster": False,
}


def test_stored_served_after_a_restart_and_a_bad_page_ends_its_request(
    model: Path, tmp_path: Path, judge: Judge
) -> None:
    """Pages are stored and, after a restart, loaded without host memory. A damaged page ends its request. This is one
    test because engines start slowly.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    first = Spied(model, tmp_path / "first", disk, **GDS)
    with first.engine:
        judge("a", first.ask_one("a"))
        first.settle()
        wait_until_durable(disk)
        first.forget()
        answer = first.ask_one("a")
        judge("a", answer)
        assert answer["host"] == whole("a"), "served from disk: host memory has taken nothing"
        pages = whole("a") // PAGE_TOKENS
        assert first.notes("landed")[-1] == {"what": "landed", "landed": True, "straight": pages}
    second = Spied(model, tmp_path / "second", disk, **GDS)
    with second.engine:
        answer = second.ask_one("a")
        judge("a", answer)
        assert answer["host"] == whole("a")
        second.forget()
        spoil(disk, [1])
        failed = second.ask_one("a")
        assert failed["finish"] == "abort", failed
        assert second.notes("landed")[-1]["landed"] is False
        # flexkv drops the damaged page. The next request gets hits on the pages before it, and the engine computes the
        # rest.
        judge("a", second.ask_one("a"))
    log = (tmp_path / "second" / "engine.log").read_text()
    assert "disk miss (data)" in log
    assert "which the engine ends" in log
