"""When an engine starts, the log says how many tokens and prompts each tier can hold. It warns if a tier cannot hold
one prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexkv.facts.ranks import KvGroup
from flexkv.unit.capacity import PromptLimit, TierCapacity
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import BLOCK_TOKENS, make_request

Make = Callable[..., MiniEngine]
SLOT_BYTES = 4096
"""Number of bytes of a block of the mini engine with one rank."""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "flexkv")
    return caplog


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in log.records
        if record.levelname == "WARNING" and record.name.startswith("flexkv")
    ]


def test_the_host_tier_is_told_in_tokens_and_prompts(
    make_engine: Make, log: pytest.LogCaptureFixture
) -> None:
    make_engine(prompt_limit=PromptLimit(1000, "max_model_len"))
    assert (
        "host tier: 2048 tokens (512 blocks of 4 tokens, 2.0 MiB), 2.0 prompts of max_model_len (1000 tokens), "
        "for 1 rank(s)"
    ) in log.messages
    assert warnings(log) == []


@pytest.mark.parametrize(
    ("size", "ranks", "setting"),
    [({"host.bytes": 12 * SLOT_BYTES}, 1, "host.bytes"), ({"host.bytes_per_rank": 12 * SLOT_BYTES}, 2, "")],
)
def test_a_host_tier_below_one_prompt_is_warned_of_with_what_holds_one(
    make_engine: Make, log: pytest.LogCaptureFixture, size: dict[str, int], ranks: int, setting: str
) -> None:
    limit = PromptLimit(512, "max_model_len")
    [key] = size
    base = {"host.bytes": None} if key != "host.bytes" else {}
    engine = make_engine(prompt_limit=limit, ranks=ranks, **(base | size))
    [warning] = warnings(log)
    assert "the host tier holds" in warning
    assert "less than one prompt of max_model_len (512 tokens)" in warning
    found = re.search(rf"set {re.escape(key)} to (\d+) \(", warning)
    assert found is not None, warning
    # The size that the warning recommends suffices; a size that is one block smaller leads to a warning.
    engine.close()
    for spare, warned in ((0, 0), (SLOT_BYTES, 1)):
        log.clear()
        make_engine(prompt_limit=limit, ranks=ranks, **(base | {key: int(found[1]) - spare}))
        assert len(warnings(log)) == warned


def test_the_prompt_that_the_warning_is_about_is_no_full_hit(
    make_engine: Make, log: pytest.LogCaptureFixture
) -> None:
    """If the start warns, a second run of the longest possible prompt is not a full hit. Without the warning it is a
    full hit.
    """
    tokens = 16 * BLOCK_TOKENS
    for blocks, warned in ((12, True), (16, False)):
        log.clear()
        engine = make_engine(
            prompt_limit=PromptLimit(tokens, "max_model_len"),
            # With this setting, stores of all blocks of the prompt may be in flight at the same time.
            **{"host.bytes": blocks * SLOT_BYTES, "store.max_reference_share": 1.0},
        )
        assert bool(warnings(log)) == warned
        engine.run(make_request(range(tokens), "first"))
        engine.forget()
        engine.run(make_request(range(tokens), "second"))
        # The engine always computes the last token itself, so a full hit lacks one token.
        assert (engine.counters.value("flexkv_hit_tokens_total") < tokens - 1) == warned


def test_a_disk_tier_is_told_alike(make_engine: Make, log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("a", "b")]

    def start(bytes_per_folder: int) -> list[str]:
        log.clear()
        settings: dict[str, Any] = {"disk.folders": folders, "disk.bytes_per_folder": bytes_per_folder}
        engine = make_engine(prompt_limit=PromptLimit(100, "max_seq_len"), **settings)
        lines = [line for line in log.messages if line.startswith("disk tier: ")]
        engine.close()
        return lines + [line for line in warnings(log) if "the disk tier holds" in line]

    line, warning = start(2 * 8192)
    found = re.search(r"set disk\.bytes_per_folder to (\d+) \(", warning)
    assert found is not None, warning
    assert re.match(r"disk tier: \d+ tokens \(\d+ blocks of 4 tokens, .*, 0\.\d prompts of max_seq_len", line)
    assert line.endswith("on 2 of 2 disk(s); 0 blocks there already")
    assert len(start(int(found[1]))) == 1


def test_disks_that_are_out_are_not_counted(
    make_engine: Make, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folders = [str(tmp_path / "file" / "x"), str(tmp_path / "good")]
    make_engine(**{"disk.folders": folders, "disk.bytes_per_folder": 100 * 8192})
    [line] = [line for line in log.messages if line.startswith("disk tier: ")]
    assert "on 1 of 2 disk(s)" in line
    tokens = re.match(r"disk tier: (\d+) tokens \((\d+) blocks", line)
    assert tokens is not None
    assert int(tokens[2]) <= 200


def test_an_engine_that_does_not_tell_its_longest_prompt_gets_no_warning() -> None:
    capacity = TierCapacity("host tier", 3, (KvGroup(16),), 1 << 20, "host.bytes")
    assert capacity.words(None) == "48 tokens (3 blocks of 16 tokens, 3.0 MiB)"
