"""Tests a request's fields for blending, the settings for blending, and the values that flexkv refuses in these fields
and settings.
"""

from __future__ import annotations

from typing import Any

import pytest

from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.facts.blend_ask import MOST_SEGMENTS, BlendAsk


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (" # # ", (" # # ",)),
        ([" # # ", [3, 4]], (" # # ", (3, 4))),
        ("[[3, 4], 5]", None),
        ("[[3, 4]]", ((3, 4),)),
        ("[3", ("[3",)),
        ("[" * 100_000, ("[" * 100_000,)),
        ("none", ()),
        ("a\ud800", None),
        ("a\0b", None),
        ([[]], None),
        ([""], None),
        ("", None),
        ([[-1]], None),
        ([[2**32]], None),
        ([[True]], None),
        (7, None),
    ],
)
def test_separators_are_texts_and_lists_of_ids(value: Any, read: Any) -> None:
    if read is not None:
        assert load_config({"blend.separators": value}, {}).blend.separators == read
        return
    with pytest.raises(ConfigError, match=r"blend\.separators"):
        load_config({"blend.separators": value}, {})


def test_the_names_of_lmcache_are_aliases() -> None:
    given = {
        "enable_blending": True,
        "blend_special_str": "##",
        "blend_recompute_ratios": [0.2],
        "blend_min_tokens": 64,
        "blend_check_layers": [2],
    }
    blend = load_config(given, {}).blend
    assert (blend.enabled, blend.separators, blend.ratio) == (True, ("##",), 0.2)
    assert (blend.min_tokens, blend.check_layer) == (64, 2)


@pytest.mark.parametrize("given", [{"blend_check_layers": [1, 2]}, {"blend_recompute_ratios": []}])
def test_several_checks_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is one check"):
        load_config(given, {})


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (True, BlendAsk()),
        (False, None),
        ({}, BlendAsk()),
        ({"store": True}, BlendAsk(store=True)),
        ({"segments": [[1, 5], [9, 12]], "ratio": 0}, BlendAsk(((1, 5), (9, 12)), 0.0)),
        ({"segments": []}, BlendAsk(())),
    ],
)
def test_an_ask_is_read(value: Any, read: BlendAsk | None) -> None:
    assert BlendAsk.read(value) == read


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        (1, "true, false"),
        ("yes", "true, false"),
        ({"segment": []}, "a mapping with segments, ratio, store"),
        ({"store": 1}, "`store`"),
        ({"store": True, "ratio": 0.1}, "`store` true alone"),
        ({"ratio": 1.1}, "`ratio` a number from 0 to 1"),
        ({"ratio": True}, "`ratio`"),
        ({"ratio": float("nan")}, "`ratio`"),
        ({"segments": [[1, 2, 3]]}, "`segments`"),
        ({"segments": [[1.0, 2]]}, "`segments`"),
        ({"segments": "1-5"}, "`segments`"),
        ({"segments": [[0, 1]] * (MOST_SEGMENTS + 1)}, str(MOST_SEGMENTS)),
    ],
)
def test_an_ask_that_cannot_be_read_says_what_is_allowed(value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed.replace("`", "`")):
        BlendAsk.read(value)
