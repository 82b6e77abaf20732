"""The types of settings: which values each accepts from YAML, the environment and the engine's config, and its bounds.

If a value is not allowed, its check raises a ValueError that says what is allowed.
"""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from flexkv.config.sizes import parse_size

MAX_COPY_THREADS = 64
"""Maximum number of copy threads: more would only contend for memory bandwidth, and the native core does not accept
more.
"""


def no_bool(value: object) -> object:
    """Refuses bools, which Python would accept as ints, because `units_per_node: true` is a mistake."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not a true/false value")
    return value


def off_is_a_word(value: object) -> object:
    """Converts false to "off", because YAML 1.1 reads a bare `off` as false."""
    return "off" if value is False else value


def on_and_off_are_words(value: object) -> object:
    """Converts true and false to "on" and "off", because YAML 1.1 reads a bare `on` or `off` as a boolean. Also
    converts the words `true` and `false`, which an environment variable may have.
    """
    if isinstance(value, str):
        return {"true": "on", "false": "off"}.get(value.strip().lower(), value)
    return "on" if value is True else off_is_a_word(value)


def off_on_or_path(value: object) -> object:
    """Accepts `off`, `on`, or the absolute path of a library."""
    value = on_and_off_are_words(value)
    if value not in ("off", "on") and not (isinstance(value, str) and value.startswith("/")):
        raise ValueError("expected off, on, or the absolute path of a library")
    return value


def none_is_a_word(value: object) -> object:
    """Converts the word `none` to None, because an environment variable cannot have a null value."""
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


def auto_or_count(value: object) -> object:
    """Accepts `auto` or a number of threads. For any other value it raises one error; otherwise pydantic would report
    one error per allowed type."""
    text = str(value).strip()
    if (
        isinstance(value, (int, str))
        and text.isascii()
        and text.isdecimal()
        and 1 <= int(text) <= MAX_COPY_THREADS
    ):
        return int(text)
    if value != "auto":
        raise ValueError(f"expected 'auto' or a whole number from 1 to {MAX_COPY_THREADS}")
    return value


def plain_text(value: object) -> object:
    """Refuses text that contains a NUL or cannot be encoded in UTF-8, such as half a surrogate pair or a variable's
    bytes that are not UTF-8. Text is hashed, written to disk and passed to other programs, all of which requires valid
    UTF-8.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError("expected text in UTF-8") from error
        if "\0" in value:
            raise ValueError("expected text without NUL")
    return value


def folders_of(value: object) -> object:
    """Splits a string into absolute paths at colons, as in PATH, and at commas. Also accepts a list. Each item of a
    list is one path and is not split."""
    if none_is_a_word(value) is None:
        return ()
    parts = re.split("[:,]", value) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError("expected paths of folders, joined by ':' or ','")
    folders = tuple(part.strip() for part in parts if part.strip())
    if relative := [folder for folder in folders if not os.path.isabs(folder)]:
        hint = "; a folder with ':' or ',' in its name is given in a list" if isinstance(value, str) else ""
        raise ValueError(f"expected absolute paths, got {relative[0]!r:.80}{hint}")
    for folder in folders:
        try:
            folder.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"expected paths in UTF-8, got {folder!r}") from error
        if "\0" in folder:
            raise ValueError(f"expected paths of folders, got {folder!r}")
    if len(set(folders)) != len(folders):
        raise ValueError("a folder is named twice")
    return folders


def folder_of(value: object) -> object:
    """Returns the absolute path of one folder; None if no folder is given. Accepts a list with one path, because the
    same setting of other systems takes a list."""
    if none_is_a_word(value) is None:
        return None
    folders = folders_of([value] if isinstance(value, str) else value)
    assert isinstance(folders, tuple)
    if len(folders) != 1:
        raise ValueError(f"expected the absolute path of one folder, got {len(folders)}")
    return folders[0]


def words_of(value: object) -> object:
    """Splits a string into words at commas. Also accepts a list of words."""
    if none_is_a_word(value) is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError("expected words joined by ','")
    words = tuple(part.strip() for part in parts if part.strip())
    for word in words:
        plain_text(word)
    if len(set(words)) != len(words):
        raise ValueError("one is named twice")
    return words


def urls_of(value: object) -> object:
    """Splits a string into URLs at commas. Also accepts a list. The store later decides which schemes are allowed."""
    urls = words_of(value)
    assert isinstance(urls, tuple)
    if any("@" in url for url in urls):
        raise ValueError("a URL has a user or password; use remote.user and remote.password_file")
    if any("?" in url or "#" in url for url in urls):
        raise ValueError("a URL has options; none are known")
    if strange := [url for url in urls if "://" not in url]:
        raise ValueError(f"expected URLs such as redis://HOST:PORT, got {strange[0]!r:.80}")
    return urls


MAX_COUNT = 2**31 - 1
"""Largest count, because pages, blocks and slots have numbers of 32 bits."""
MAX_BYTES = 1 << 60
MAX_SECONDS = 10_000_000
"""Longest time that the native core can wait: 115 days."""

Count = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MAX_COUNT)]
CountOrNone = Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=MAX_COUNT)]
SizeBytes = Annotated[int, BeforeValidator(parse_size), BeforeValidator(no_bool), Field(ge=1, le=MAX_BYTES)]
Text = Annotated[str, BeforeValidator(plain_text)]
OptionalNode = Annotated[
    Annotated[int, BeforeValidator(no_bool), Field(ge=0, lt=64)] | None, BeforeValidator(none_is_a_word)
]
OptionalCount = Annotated[Count | None, BeforeValidator(none_is_a_word)]
OptionalSizeBytes = Annotated[SizeBytes | None, BeforeValidator(none_is_a_word)]
Seconds = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
BeatSeconds = Annotated[Seconds, Field(ge=0.05, le=60)]
OptionalSeconds = Annotated[Seconds | None, BeforeValidator(none_is_a_word)]
OptionalWholeSeconds = Annotated[Count | None, BeforeValidator(none_is_a_word)]
Folders = Annotated[tuple[str, ...], BeforeValidator(folders_of)]
OptionalFolder = Annotated[str | None, BeforeValidator(folder_of)]
Words = Annotated[tuple[str, ...], BeforeValidator(words_of)]
Urls = Annotated[tuple[str, ...], BeforeValidator(urls_of)]
Share = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=1, allow_inf_nan=False)]
