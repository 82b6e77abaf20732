"""Requests with the same tokens but different KV: no such request gets hits on blocks of another one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import Engines, connector
from .lora_files import write_lora
from .session import EngineSession, Prompt


def test_prompts_given_as_embeddings(engines: Engines) -> None:
    """Prompts that are given as embeddings get no hits on each other's blocks. In vLLM all such prompts have the same
    token ids, namely zeros, so the ids do not distinguish them.
    """
    session = engines.get(connector(store__partial_blocks=True), enable_prompt_embeds=True)
    alone = engines.another(None, enable_prompt_embeds=True, enable_prefix_caching=False)

    def ask(*seeds: int, of: EngineSession = session) -> list[tuple[list[int], int]]:
        reply = of.call("ask_embeddings", seeds=list(seeds), tokens=150, max_tokens=12)
        return [(result["tokens"], result["cached"]) for result in reply["requests"]]

    first, second = ask(1, 2)
    assert first[0] != second[0]
    wanted = [tokens for tokens, _ in ask(1, 2, 3, of=alone)]
    assert [first[0], second[0]] == wanted[:2]
    session.forget()
    third, first_again, second_again = ask(3, 1, 2)
    assert third == (wanted[2], 0)
    assert first_again == (first[0], 128)
    assert second_again == (second[0], 128)
    session.forget()
    plain = Prompt(tuple([0] * 150))
    assert session.check_one(plain).cached == 0, "a prompt of zero tokens was taken for embeddings"


def test_lora_adapters_are_never_served_each_others_pages(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    session = engines.get(connector(store__partial_blocks=True), enable_lora=True, max_lora_rank=8)
    alone = engines.another(None, enable_lora=True, max_lora_rank=8, enable_prefix_caching=False)
    one, two = (str(write_lora(tmp_path / name, seed)) for seed, name in enumerate(("one", "two")))
    prompt = Prompt.of(150, stream)

    def ask(folder: str, number: int, of: EngineSession = session) -> tuple[list[int], int]:
        [result] = of.call("ask_with_lora", request=prompt.wire(), folder=folder, number=number)["requests"]
        return result["tokens"], result["cached"]

    with_one, _ = ask(one, 1)
    with_two, cached = ask(two, 2)
    assert cached == 0
    without, cached = ask("", 0)
    assert cached == 0
    assert with_one != with_two
    assert without not in (with_one, with_two)
    assert tuple(without) == session.reference.tokens(prompt)
    assert [with_one, with_two] == [ask(folder, n, of=alone)[0] for n, folder in ((1, one), (2, two))]
    for folder, number, tokens in ((two, 2, with_two), (one, 1, with_one), ("", 0, without)):
        session.forget(number)
        answer, cached = ask(folder, number)
        assert answer == tokens
        assert cached >= prompt.whole_blocks


@pytest.mark.parametrize(("number", "in_place"), [(2, False), (1, True)])
def test_adapter_loaded_anew_from_its_path_is_served_no_pages_until_it_has_a_new_one(
    engines: Engines, stream: int, tmp_path: Path, number: int, in_place: bool
) -> None:
    """If an adapter's files get new content at the same path, requests get no hits until the adapter is at a new path.
    The engine computes with the old content until the adapter is loaded again, under another number or in place.
    """
    session = engines.get(connector(), enable_lora=True, max_lora_rank=8)
    alone = engines.another(None, enable_lora=True, max_lora_rank=8, enable_prefix_caching=False)
    folder = tmp_path / "adapter"
    prompt, other = Prompt.of(150, stream), Prompt.of(150, stream + 1)

    def ask(
        prompt: Prompt,
        number: int,
        in_place: bool = False,
        of: EngineSession = session,
        folder: Path = folder,
    ) -> tuple[list[int], int]:
        arguments = {"folder": str(folder), "number": number, "in_place": in_place}
        [result] = of.call("ask_with_lora", request=prompt.wire(), **arguments)["requests"]
        return result["tokens"], result["cached"]

    write_lora(folder, 1)
    ask(prompt, 1)
    shutil.rmtree(folder)
    write_lora(folder, 2)
    former, _ = ask(other, 1)
    session.forget(1)
    wanted, _ = ask(other, 2, of=alone)
    assert wanted != former
    # flexkv cannot know with which content the engine computes, so requests get no hits, and nothing is stored.
    assert ask(other, number, in_place) == (wanted, 0)
    session.forget(2)
    assert ask(other, number) == (wanted, 0)
    # A control: the same content is at a new path. Its pages are stored, and the next request gets a hit.
    anew = shutil.copytree(folder, tmp_path / "anew")
    assert ask(other, 3, folder=anew) == (wanted, 0)
    session.forget(3)
    assert ask(other, 3, folder=anew) == (wanted, other.whole_blocks)


@pytest.mark.parametrize("again", ["evicted", "in place"])
def test_an_adapter_that_changes_between_its_load_and_its_first_request(
    engines: Engines, stream: int, tmp_path: Path, again: str
) -> None:
    """An adapter's files may change between its load and its first request. vLLM computes with the content that it has
    loaded. After it has evicted the adapter or loaded it again in place, it computes with the new content. The other
    engine shows which answer is right.
    """
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    session, alone = engines.get(connector(), **options), engines.another(None, **options)
    prompt, other = Prompt.of(150, stream), Prompt.of(150, stream + 1)
    number = 21 if again == "evicted" else 31

    def story(of: EngineSession, root: Path) -> list[tuple[list[int], int]]:
        folder, next_folder = root / "adapter", root / "next"
        write_lora(folder, 1)
        write_lora(next_folder, 7)

        def ask(asked: Prompt, number: int, folder: Path) -> tuple[list[int], int]:
            lora = {"folder": str(folder), "number": number, "in_place": False}
            [result] = of.call("ask_with_lora", request=asked.wire(), **lora)["requests"]
            return result["tokens"], result["cached"]

        assert of.call("add_lora", folder=str(folder), number=number)["added"]
        shutil.rmtree(folder)
        write_lora(folder, 2)
        answers = [ask(prompt, number, folder)]
        of.forget(1)
        if again == "evicted":
            ask(other, number + 1, next_folder)
        else:
            of.call("add_lora", folder=str(folder), number=number, in_place=True)
        of.forget(2)
        return [*answers, ask(prompt, number, folder)]

    (tmp_path / "alone").mkdir()
    (tmp_path / "flexkv").mkdir()
    wanted = [tokens for tokens, _ in story(alone, tmp_path / "alone")]
    assert wanted[0] != wanted[1], "the control: the content decides the answer"
    found = story(session, tmp_path / "flexkv")
    assert [tokens for tokens, _ in found] == wanted
    assert found[1][1] == 0


def test_an_adapter_trained_anew_over_the_lives_of_three_processes(
    engines: Engines, stream: int, tmp_path: Path
) -> None:
    """An adapter that was trained again gets no pages of the old adapter from disk. The adapter's name, number and path
    and vLLM's hashes stay the same over three processes. Only the adapter's content shows that the pages belong to the
    old one.
    """
    folder, disk = tmp_path / "adapter", tmp_path / "disk"
    prompt = Prompt.of(150, stream)

    def life() -> tuple[list[int], int]:
        engines.close()
        engines.close_others()
        connected = connector(
            disk__folders=str(disk), disk__bytes_per_folder=64 << 20, disk__compute_if_faster=False
        )
        session = engines.another(connected, enable_lora=True, max_lora_rank=8)
        [result] = session.call("ask_with_lora", request=prompt.wire(), folder=str(folder), number=1)[
            "requests"
        ]
        session.settle()
        return result["tokens"], result["cached"]

    write_lora(folder, 1)
    first, cached = life()
    assert cached == 0
    # A control: the adapter has not changed, and the next process gets a hit from disk.
    assert life() == (first, prompt.whole_blocks)
    shutil.rmtree(folder)
    write_lora(folder, 2)
    again, cached = life()
    assert cached == 0
    assert again != first
