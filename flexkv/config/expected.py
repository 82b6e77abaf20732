"""Describes the values that a setting accepts. These texts replace the messages of pydantic, which checks the
values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

WORDS = {
    "literal_error": "expected {expected}",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "finite_number": "expected a finite number",
    "string_type": "expected a string (in YAML, put it in quotes)",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected {ge} or more",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "multiple_of": "expected a multiple of {multiple_of}",
}
"""Maps each kind of pydantic's errors to flexkv's message, a template that is filled from the error's context."""

NUMBERS = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
}
"""For each kind of pydantic's errors about a value that is not a number, or not a whole number: the expected value in
words. The message adds the bounds.
"""


def expected(fault: Mapping[str, Any], name: str, field: FieldInfo) -> str:
    """Returns a text that describes the allowed values, for a value that pydantic rejected. Messages of flexkv's own
    validators stay unchanged.

    Args:
        fault: an item of pydantic's `ValidationError.errors()`.
        name: the field's name. Its ending gives the unit: `_s` for seconds.
    """
    kind = fault["type"]
    if kind in NUMBERS:
        unit = " of seconds" if name.endswith("_s") else ""
        return ", ".join([f"expected {NUMBERS[kind]}{unit}", *_bounds(field)])
    if kind in WORDS:
        return WORDS[kind].format(**fault.get("ctx", {}))
    return str(fault["msg"]).removeprefix("Value error, ")


def _bounds(field: FieldInfo) -> list[str]:
    """Returns the narrowest bound on each side, in words. Returns no bounds for an optional field, because its bounds
    are nested in its type.
    """

    def given(name: str) -> list[float]:
        return [getattr(part, name) for part in field.metadata if hasattr(part, name)]

    low, above, high = given("ge"), given("gt"), given("le")
    said = [f"{max(low)} or more"] if low else []
    said += [f"more than {max(above)}"] if above else []
    return said + ([f"at most {min(high)}"] if high else [])
