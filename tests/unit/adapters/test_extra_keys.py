"""Extra keys give the partial tails of different callers different keys."""

from __future__ import annotations

import pytest

from flexkv.adapters.common.framed import framed
from flexkv.adapters.vllm.block_keys import tail_extra
from tests.unit.adapters.vllm_objects import embeddings, image, lora, make_request

TOKENS = range(10, 16)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a",), "a"),
        (1, "1"),
        (1, True),
        (None, ""),
        (b"a", "a"),
        (((),), ()),
        ({"a": 1}, {"a": 2}),
        (1.0, 1),
    ],
)
def test_different_values_have_different_bytes(one: object, other: object) -> None:
    assert framed(one) != framed(other)


def test_order_of_a_mapping_does_not_matter() -> None:
    assert framed({"a": 1, "b": 2}) == framed({"b": 2, "a": 1})


def test_a_value_without_stable_form_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        framed(object())


def test_salt_counts_in_the_first_block_only() -> None:
    plain, salted = make_request(TOKENS), make_request(TOKENS, cache_salt="tenant")
    assert tail_extra(plain, 0, 3) != tail_extra(salted, 0, 3)
    # Later blocks do not need the salt in their extra keys, because their hash depends on the hash of their parent
    # block.
    assert tail_extra(plain, 4, 6) == tail_extra(salted, 4, 6)
    assert plain.block_hashes[0] != salted.block_hashes[0]


def test_adapters_of_different_names_are_apart() -> None:
    requests = [make_request(TOKENS), *(make_request(TOKENS, lora_request=lora(name)) for name in ("a", "b"))]
    assert len({tail_extra(request, 4, 6) for request in requests}) == 3


def test_the_number_of_an_adapter_does_not_count() -> None:
    one, two = (make_request(TOKENS, lora_request=lora("a", number)) for number in (1, 2))
    assert tail_extra(one, 4, 6) == tail_extra(two, 4, 6)


def test_prompt_embeddings_have_no_tail() -> None:
    request = make_request(prompt_embeds=embeddings(0, 6))
    assert tail_extra(request, 4, 6) is None


def test_an_image_in_the_tail_means_no_tail() -> None:
    inside = make_request(TOKENS, mm_features=[image("one", 3, 2)])
    before = make_request(TOKENS, mm_features=[image("one", 1, 3)])
    assert tail_extra(inside, 4, 6) is None
    assert tail_extra(before, 4, 6) is not None
