"""Requests whose tokens are the same and whose KV is not: none may be served another's blocks."""

from __future__ import annotations

from pathlib import Path

from .conftest import Engines, connector
from .lora_files import write_lora
from .session import Prompt


def test_prompts_given_as_embeddings(engines: Engines) -> None:
    """All have the same token ids, zeros. An engine without connector has nothing to compare: the first run counts."""
    session = engines.get(connector(store__partial_blocks=True), enable_prompt_embeds=True)

    def ask(*seeds: int) -> list[tuple[list[int], int]]:
        reply = session.call("ask_embeddings", seeds=list(seeds), tokens=150, max_tokens=12)
        return [(result["tokens"], result["cached"]) for result in reply["requests"]]

    first, second = ask(1, 2)
    assert first[0] != second[0]
    session.forget()
    third, first_again, second_again = ask(3, 1, 2)
    assert third[1] == 0
    assert first_again == (first[0], 128)
    assert second_again == (second[0], 128)
    session.forget()
    plain = Prompt(tuple([0] * 150))
    assert session.check_one(plain).cached == 0, "a prompt of zero tokens was taken for embeddings"


def test_adapters(engines: Engines, stream: int, tmp_path: Path) -> None:
    session = engines.get(connector(store__partial_blocks=True), enable_lora=True, max_lora_rank=8)
    one, two = (str(write_lora(tmp_path / name, seed)) for seed, name in enumerate(("one", "two")))
    prompt = Prompt.of(150, stream)

    def ask(folder: str, number: int) -> tuple[list[int], int]:
        [result] = session.call("ask_with_lora", request=prompt.wire(), folder=folder, number=number)[
            "requests"
        ]
        return result["tokens"], result["cached"]

    with_one, _ = ask(one, 1)
    with_two, cached = ask(two, 2)
    assert cached == 0
    without, cached = ask("", 0)
    assert cached == 0
    assert with_one != with_two
    assert without not in (with_one, with_two)
    assert tuple(without) == session.reference.tokens(prompt)
    for folder, number, tokens in ((two, 2, with_two), (one, 1, with_one), ("", 0, without)):
        session.forget(number)
        answer, cached = ask(folder, number)
        assert answer == tokens
        assert cached >= prompt.whole_blocks
