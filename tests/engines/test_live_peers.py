"""Two engines that run at the same time serve each other's prompts. Each engine continues when the other one ends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.model import write_model

from .conftest import BLOCKS_OF_ALL_GROUPS, GROUPS, Engines, connector, engine_arguments
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference
from .test_data_parallel import SMALL, run
from .test_disk import SLAB_BYTES
from .test_hybrid import WINDOW_PAGES

HOST_HITS = "vllm:flexkv_hit_blocks_total{tier=peer-host}"
FOLDER_HITS = "vllm:flexkv_hit_blocks_total{tier=peers}"
COPIED = "vllm:flexkv_peer_pages_total{outcome=copied}"
GONE = "vllm:flexkv_peer_pages_total{outcome=absent}"
LEFT_OUT = "vllm:flexkv_once_pages_total{outcome=left_out}"
PROMOTED = "vllm:flexkv_once_pages_total{outcome=promoted}"
WITHIN_S = 60.0
ROUNDS = 8
"""Number of prompts after which two ranks must have found each other. A unit looks for peers twice a second, and less
often on a busy machine.
"""
TOKENS = 581
PAGES = (TOKENS - 1) // BLOCK_TOKENS


def shared(tmp_path: Path, share: str = "host+disk", **more: Any) -> dict[str, Any]:
    """Makes the configuration of an engine that shares pages. The engine always reads pages from disk, even though the
    tiny model computes faster than the disk reads.
    """
    return connector(
        peers__share=share,
        peers__folder=str(tmp_path / "run"),
        disk__compute_if_faster=False,
        **more,
    )


def until(done: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < ends_s, "it never came to that"
        time.sleep(0.05)


def knows(session: EngineSession, tier: str, pages: int) -> Callable[[], bool]:
    return lambda: session.call("peers")["known"][tier] >= pages


def test_a_prompt_computed_in_one_engine_is_a_hit_in_the_other(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    one, other = engines.another(shared(tmp_path)), engines.another(shared(tmp_path))
    mine, yours = Prompt.of(TOKENS, stream), Prompt.of(TOKENS, stream + 1)
    assert one.check_one(mine).cached == 0
    assert other.check_one(yours).cached == 0
    one.settle()
    other.settle()
    until(knows(other, "peer-host", PAGES))
    until(knows(one, "peer-host", PAGES))
    assert other.check_one(mine).cached == mine.whole_blocks
    assert one.check_one(yours).cached == yours.whole_blocks
    for session in (one, other):
        session.settle()
        assert session.metric(HOST_HITS) == session.metric(COPIED) == PAGES


def test_engines_of_six_kv_groups_serve_each_other(
    engines: Engines, gemma_3: Path, gemma_3_alone: Reference, stream: int, tmp_path: Path
) -> None:
    """Engines with six KV groups serve each other's prompts. Pages of each group come from the other engine's host
    memory: all pages of the full group, and the last window's pages of the other groups.
    """
    more: dict[str, Any] = {"model": str(gemma_3), "num_gpu_blocks_override": BLOCKS_OF_ALL_GROUPS}
    one, other = (
        EngineSession(engines.another(shared(tmp_path), **more).process, gemma_3_alone) for _ in range(2)
    )
    prompt = Prompt.of(405, stream)
    assert one.check_one(prompt).cached == 0
    one.settle()
    until(knows(other, "peer-host", one.call("host_pages")["pages"]))
    assert other.check_one(prompt).cached == prompt.whole_blocks
    other.settle()
    needed = prompt.whole_blocks // BLOCK_TOKENS + (GROUPS - 1) * WINDOW_PAGES
    assert other.metric(COPIED) == needed


def test_a_peer_killed_in_the_copy_costs_no_token(engines: Engines, stream: int, tmp_path: Path) -> None:
    one, other = engines.another(shared(tmp_path)), engines.another(shared(tmp_path))
    prompt = Prompt.of(TOKENS, stream)
    one.check_one(prompt)
    one.settle()
    until(knows(other, "peer-host", PAGES))
    other.call("kill_in_copy")
    answer = other.check_one(prompt)
    assert answer.cached < prompt.whole_blocks
    other.settle()
    assert other.metric(COPIED) == 4
    until(lambda: not any((tmp_path / "run").iterdir()) or other.call("peers")["peers"] == [])
    assert other.check_one(Prompt.of(TOKENS, stream + 1)).cached == 0


@pytest.mark.parametrize("store", ["once", "own"])
def test_two_engines_keep_a_prompt_once_and_one_takes_it_over(
    engines: Engines, stream: int, tmp_path: Path, store: str
) -> None:
    """With `peers.store: once`, only one of two engines keeps the prompt, and the other takes it over later. With
    `own`, the control, both engines keep it."""
    told = shared(tmp_path, peers__store=store)
    one, other = engines.another(told), engines.another(told)
    prompt = Prompt.of(TOKENS, stream)
    one.check_one(prompt)
    one.settle()
    until(knows(other, "peer-host", PAGES))
    kept = one.call("host_pages")["pages"]
    assert kept >= PAGES
    assert other.check_one(prompt).cached == prompt.whole_blocks
    other.settle()
    beside = other.call("host_pages")["pages"]
    assert beside <= kept - PAGES if store == "once" else beside >= PAGES
    assert other.metric(LEFT_OUT) >= (PAGES if store == "once" else 0)
    assert other.call("kill_peer")["joined"] == 0
    other.forget()
    assert other.check_one(prompt).cached == prompt.whole_blocks
    other.settle()
    assert other.call("host_pages")["pages"] >= PAGES
    assert other.metric(PROMOTED) >= (PAGES if store == "once" else 0)


def test_pages_in_a_running_engines_folder_are_served(engines: Engines, stream: int, tmp_path: Path) -> None:
    def start(name: str) -> EngineSession:
        told = shared(
            tmp_path,
            "disk",
            disk__folders=str(tmp_path / name),
            disk__bytes_per_folder=SLAB_BYTES,
        )
        return engines.another(told)

    one, other = start("a"), start("b")
    prompt = Prompt.of(TOKENS, stream)
    one.check_one(prompt)
    one.settle()
    until(lambda: bool(one.check_one(Prompt.of(5, 7, max_tokens=1))) and knows(other, "peers", PAGES)())
    assert other.check_one(prompt).cached == prompt.whole_blocks
    other.settle()
    assert other.metric(FOLDER_HITS) == PAGES


class Returned:
    """Makes two engines. One has stored a prompt and keeps running. The other one is killed and restarted.

    Args:
        told: the engines' `kv_transfer_config`.
        retrained: folder with weights that replace the model's before the restart; None to keep them.
        environment: environment variables of the restarted engine.

    Attributes:
        stays: the engine that keeps running.
        back: the restarted engine.
        prompt: the prompt that `stays` has stored.
    """

    def __init__(
        self,
        engines: Engines,
        model: Path,
        told: dict[str, Any],
        stream: int,
        retrained: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.prompt = Prompt.of(TOKENS, stream)
        one, self.stays = (engines.another(told, model=str(model)) for _ in range(2))
        self.stays.check_one(self.prompt)
        self.stays.settle()
        until(knows(one, "peer-host", PAGES))
        self.stays.call("kill_peer")
        if retrained is not None:
            shutil.copytree(retrained, model, dirs_exist_ok=True)
        self.back = engines.another(told, environment, model=str(model))
        if retrained is not None:
            alone = engines.another(None, enable_prefix_caching=False, model=str(retrained))
            self.back.reference = Reference(alone.process)


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """A copy of the model in the test's own folder."""
    return Path(shutil.copytree(model, tmp_path / "model"))


@pytest.fixture
def retrained(model: Path) -> Path:
    return write_model(model.parent, "tiny", seed=1)


def declines(session: EngineSession, other: EngineSession) -> Callable[[], bool]:
    unit = other.call("declined")["unit"]
    return lambda: unit in session.call("declined")["declined"]


@pytest.mark.parametrize("other", ["model", "version"])
def test_a_peer_that_comes_back_as_another_shares_nothing(
    engines: Engines, own_model: Path, retrained: Path, stream: int, tmp_path: Path, other: str
) -> None:
    told = shared(tmp_path)
    if other == "model":
        world = Returned(engines, own_model, told, stream, retrained)
    else:
        world = Returned(engines, own_model, told, stream, environment={"PEER_PROTOCOL": "99"})
    until(declines(world.stays, world.back))
    until(declines(world.back, world.stays))
    assert world.back.check_one(world.prompt).cached == 0
    mine = Prompt.of(TOKENS, stream + 1)
    assert world.back.check_one(mine).cached == 0
    world.back.settle()
    assert world.stays.check_one(mine).cached == 0
    for session in (world.stays, world.back):
        assert session.call("peers")["peers"] == []
        assert session.metric(COPIED) == 0


def test_control_a_model_under_the_name_of_another_is_answered_for_it(
    engines: Engines, own_model: Path, retrained: Path, stream: int, tmp_path: Path
) -> None:
    world = Returned(engines, own_model, shared(tmp_path, identity__model="both"), stream, retrained)
    until(knows(world.back, "peer-host", PAGES))
    [answer] = world.back.ask(world.prompt)
    assert answer.cached == world.prompt.whole_blocks
    assert answer.tokens != world.back.reference.tokens(world.prompt)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_data_parallel_ranks_serve_each_other(
    model: Path, reference: Reference, stream: int, tmp_path: Path
) -> None:
    """Two data-parallel ranks serve each other's prompts. `peers.share` is `auto`, and the units share because the
    settings say that two units run on the node. The second rank finds the first while prompts are computed, so the
    ranks get several prompts, one after the other.
    """
    prompts = [Prompt.of(300, stream + number) for number in range(ROUNDS)]
    told = connector(
        host__bytes=24 << 20,
        host__units_per_node=2,
        peers__share="auto",
        peers__folder=str(tmp_path / "run"),
        disk__compute_if_faster=False,
    )
    arguments = engine_arguments(model) | SMALL | {"data_parallel_size": 2, "kv_transfer_config": told}
    orders: list[Any] = []
    for prompt in prompts:
        asked = list(prompt.ids)
        orders += [("mine", 0, asked), None, ("yours", 1, asked)]
    answers = run(arguments, orders, tmp_path / "engine.log")
    mine, yours = answers[::2], answers[1::2]
    for prompt, *both in zip(prompts, mine, yours, strict=True):
        for answer in both:
            assert tuple(answer["tokens"]) == reference.tokens(prompt), answer
    assert [answer["cached"] for answer in mine] == [0] * ROUNDS
    assert yours[-1]["cached"] == prompts[-1].whole_blocks, yours
