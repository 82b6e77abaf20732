"""Tests hashes, key chains and namespaces."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv import c_ext
from flexkv.cache.keys import EngineKeyChain, TokenChain, namespace_digest, tail_candidates, tail_key
from flexkv.errors import ConfigError, ContractError, KeySchemeError, TokenError

NAMESPACE = namespace_digest({"model": "m", "epoch": 0})


def sglang_page_hashes(elements: list[tuple[int, ...]], page: int) -> list[bytes]:
    """Returns the chain of page hashes that SGLang computes, computed with hashlib. An element is one token, or two for
    EAGLE.
    """
    hashes: list[bytes] = []
    for begin in range(0, len(elements) // page * page, page):
        hasher = hashlib.sha256(hashes[-1] if hashes else b"")
        for element in elements[begin : begin + page]:
            for token in element:
                hasher.update(token.to_bytes(4, "little"))
        hashes.append(hasher.digest())
    return hashes


@settings(deadline=None)
@given(st.binary(max_size=1000))
def test_sha256_equals_hashlib(data: bytes) -> None:
    assert c_ext.sha256(data) == c_ext.sha256(data, portable=True) == hashlib.sha256(data).digest()


def test_sha256_equals_hashlib_around_block_boundaries() -> None:
    for size in [*range(200), 4095, 4096, 4097, 100_003]:
        data = random.Random(size).randbytes(size)
        for portable in (False, True):
            assert c_ext.sha256(data, portable=portable) == hashlib.sha256(data).digest(), size


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 9), st.booleans())
def test_token_chain_is_sglangs(tokens: list[int], page: int, bigram: bool) -> None:
    elements: list[tuple[int, ...]] = list(itertools.pairwise(tokens)) if bigram else [(t,) for t in tokens]
    chain = TokenChain(page, bigram=bigram)
    chain.extend(tokens[: len(tokens) // 2])
    chain.extend(tokens)
    assert [bytes(d) for d in chain.digests] == sglang_page_hashes(elements, page)


def test_token_chain_continues_from_a_seed_and_from_a_later_start() -> None:
    tokens = list(range(64))
    whole = TokenChain(16)
    assert whole.extend(tokens) == 4
    rest = TokenChain(16, seed=bytes(whole.digests[1]))
    assert rest.extend(tokens[32:]) == 2
    assert (rest.digests == whole.digests[2:]).all()
    late = TokenChain(16)
    late.extend(tokens[:20])
    assert late.extend(tokens[10:], start=10) == 3
    assert (late.digests == whole.digests).all()
    with pytest.raises(ContractError, match="starts at 80"):
        late.extend([1], start=80)


@pytest.mark.parametrize("kind", ["list", "tuple", "int32", "int64", "uint32", "numpy scalars"])
def test_token_chain_reads_every_kind_of_sequence(kind: str) -> None:
    tokens = [random.Random(7).randrange(150_000) for _ in range(48)]
    given_tokens: object = {
        "list": lambda: tokens,
        "tuple": lambda: tuple(tokens),
        "numpy scalars": lambda: [np.int64(t) for t in tokens],
    }.get(kind, lambda: np.array(tokens, kind))()
    chain, reference = TokenChain(16), TokenChain(16)
    reference.extend(tokens)
    assert chain.extend(given_tokens) == 3
    assert (chain.digests == reference.digests).all()


@pytest.mark.parametrize("bad", [True, 1.5, "7", None, -1, 2**32, 10**30])
def test_a_bad_token_is_named_and_nothing_is_appended(bad: object) -> None:
    chain = TokenChain(4)
    tokens: list[object] = [1, 2, 3, 4, 5, bad, 7, 8]
    with pytest.raises(TokenError, match=r"token 5 is .*allowed are integers from 0 to 2\*\*32 - 1"):
        chain.extend(tokens)
    assert len(chain) == 0


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_bad_token_in_an_array_is_named(bad: int) -> None:
    with pytest.raises(TokenError, match=f"token 2 is {bad}"):
        TokenChain(4).extend(np.array([1, 2, bad, 4], np.int64))


def test_tokens_of_a_wrong_kind_are_refused() -> None:
    for tokens in (np.zeros(4, np.float32), np.zeros((2, 2), np.int64), "1234", 7, {1: 2}):
        with pytest.raises(TokenError, match="allowed"):
            TokenChain(2).extend(tokens)
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        TokenChain(0)
    with pytest.raises(KeySchemeError, match="31 bytes"):
        TokenChain(4, seed=bytes(31))


@settings(deadline=None)
@given(st.lists(st.binary(min_size=16, max_size=64), max_size=20), st.integers(0, 2**32 - 1))
def test_engine_keys_hash_the_framed_fields(engine_keys: list[bytes], group: int) -> None:
    chain = EngineKeyChain(NAMESPACE, group)
    prefix = b"flexkv block key v1".ljust(24, b"\0") + NAMESPACE + group.to_bytes(4, "little") + bytes(4)
    assert chain.extend(engine_keys) == len(engine_keys)
    expected = [
        hashlib.sha256(prefix + len(key).to_bytes(4, "little") + key).digest()[:16] for key in engine_keys
    ]
    assert [bytes(key) for key in chain.keys] == expected


def test_engine_keys_are_appended_once() -> None:
    engine_keys = [hashlib.sha256(bytes([i])).digest() for i in range(10)]
    chain, whole = EngineKeyChain(NAMESPACE, 0), EngineKeyChain(NAMESPACE, 0)
    whole.extend(engine_keys)
    assert chain.extend(engine_keys[:4]) == 4
    assert chain.extend(engine_keys) == 6
    assert chain.extend(engine_keys) == 0
    assert (chain.keys == whole.keys).all()
    array = EngineKeyChain(NAMESPACE, 0)
    array.extend(np.frombuffer(b"".join(engine_keys), np.uint8).reshape(10, 32))
    assert (array.keys == whole.keys).all()


def test_views_outlive_growth_and_truncation() -> None:
    engine_keys = [hashlib.sha256(bytes([i])).digest() for i in range(200)]
    chain = EngineKeyChain(NAMESPACE, 0)
    chain.extend(engine_keys[:100])
    view = chain.keys
    before = view.copy()
    chain.extend(engine_keys)
    chain.truncate(50)
    chain.extend(list(reversed(engine_keys[:50])), start=50)
    assert (view == before).all()
    assert not view.flags.writeable
    del chain
    assert (view == before).all()


@pytest.mark.parametrize("bad", [b"12345678", bytes(65), 12345, b""])
def test_keys_that_no_cryptographic_hash_gives_are_refused(bad: object) -> None:
    chain = EngineKeyChain(NAMESPACE, 0)
    with pytest.raises(KeySchemeError, match=r"engine block key 1 .*--prefix-caching-hash-algo sha256"):
        chain.extend([bytes(32), bad])
    assert len(chain) == 0


def test_group_and_namespace_separate_keys() -> None:
    key = [bytes(32)]
    keys = set()
    for namespace in (NAMESPACE, namespace_digest({"model": "m", "epoch": 1})):
        for group in (0, 1):
            chain = EngineKeyChain(namespace, group)
            chain.extend(key)
            keys.add(bytes(chain.keys[0]))
    assert len(keys) == 4
    with pytest.raises(KeySchemeError, match="namespace has 5 bytes"):
        EngineKeyChain(b"model", 0)


def test_namespace_fields_cannot_alias() -> None:
    digests = [
        namespace_digest(fields)
        for fields in (
            {},
            {"a": ""},
            {"a": "bc"},
            {"ab": "c"},
            {"a": b"bc"},
            {"a": 1},
            {"a": "1"},
            {"a": "b", "c": ""},
            {"a": "", "c": "b"},
            {"a": "b\0\0\0\x01c"},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert namespace_digest({"x": 1, "y": 2}) == namespace_digest({"y": 2, "x": 1})
    for bad in (True, 1.5, None):
        with pytest.raises(KeySchemeError, match="field 'x'"):
            namespace_digest({"x": bad})  # type: ignore[dict-item]


def test_a_namespace_cannot_pass_for_a_block() -> None:
    """A namespace and the first tokens of a block never give the same key, because the namespace is hashed with
    framing. Without framing, a 16-character namespace and four tokens of 32 bits would give the same key.
    """
    name = "sixteen-chars-ab"
    as_tokens = [int.from_bytes(name.encode()[i : i + 4], "little") for i in range(0, 16, 4)]
    tokens = [1, 2, 3, 4]
    unframed = hashlib.sha256(name.encode() + b"".join(t.to_bytes(4, "little") for t in tokens)).digest()
    no_namespace = hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in as_tokens + tokens)).digest()
    assert unframed == no_namespace, "the control: without framing the two are one key"

    def last_key(namespace: dict[str, bytes | str | int], all_tokens: list[int]) -> bytes:
        tokens_chain, chain = TokenChain(len(all_tokens)), EngineKeyChain(namespace_digest(namespace), 0)
        tokens_chain.extend(all_tokens)
        chain.extend(tokens_chain.digests)
        return bytes(chain.keys[-1])

    assert last_key({"name": name}, tokens) != last_key({}, as_tokens + tokens)


@pytest.mark.parametrize("count", [(1 << 27) + 1, 1 << 40])
def test_more_tokens_than_any_context_are_refused(count: int) -> None:
    """A call with more tokens than any context has is refused before the tokens are read. The array repeats one number,
    so making it takes no memory, but reading it would take terabytes.
    """
    with pytest.raises(TokenError, match=f"tokens are {count}; allowed are up to 134217728 in one call"):
        TokenChain(16).extend(np.broadcast_to(np.int64(7), count))


def test_tail_candidates_are_the_keys_of_their_tokens() -> None:
    parent = hashlib.sha256(b"parent").digest()
    tokens = [11, 12, 13, 14, 15]
    found = tail_candidates(NAMESPACE, 0, parent, b"salt", tokens, 16, 3)
    assert found is not None
    assert found.tokens.tolist() == [5, 4, 3, 2, 1]
    assert found.base_block == 3
    for key, count in zip(found.keys, found.tokens, strict=True):
        assert bytes(key) == bytes(tail_key(NAMESPACE, 0, parent, b"salt", tokens[:count], 3)[0])
    longer = tail_candidates(NAMESPACE, 0, parent, b"", list(range(100)), 16, 3)
    assert longer is not None
    assert longer.tokens.tolist() == list(range(15, 0, -1))
    assert tail_candidates(NAMESPACE, 0, parent, b"", [], 16, 3) is None
    assert tail_candidates(NAMESPACE, 0, parent, b"", [1], 1, 3) is None


def test_every_part_of_a_tail_key_counts() -> None:
    parent = hashlib.sha256(b"parent").digest()
    other = namespace_digest({"model": "other"})
    keys = [
        tail_key(NAMESPACE, 0, parent, b"", [1, 2], 3),
        tail_key(NAMESPACE, 0, parent, b"", [1, 3], 3),
        tail_key(NAMESPACE, 0, parent, b"", [1], 3),
        tail_key(NAMESPACE, 0, parent, b"x", [1, 2], 3),
        tail_key(NAMESPACE, 1, parent, b"", [1, 2], 3),
        tail_key(NAMESPACE, 0, hashlib.sha256(b"p").digest(), b"", [1, 2], 3),
        tail_key(NAMESPACE, 0, None, b"", [1, 2], 0),
        tail_key(other, 0, parent, b"", [1, 2], 3),
    ]
    assert len({bytes(key[0]) for key in keys}) == len(keys)


def test_a_tail_needs_the_right_parent() -> None:
    with pytest.raises(KeySchemeError, match="needs the last one's engine key"):
        tail_key(NAMESPACE, 0, None, b"", [1], 3)
    with pytest.raises(KeySchemeError, match="no parent"):
        tail_key(NAMESPACE, 0, bytes(32), b"", [1], 0)
    with pytest.raises(KeySchemeError, match="8 bytes"):
        tail_key(NAMESPACE, 0, bytes(8), b"", [1], 3)
    with pytest.raises(TokenError, match="token 1"):
        tail_key(NAMESPACE, 0, bytes(32), b"", [1, -2], 3)
