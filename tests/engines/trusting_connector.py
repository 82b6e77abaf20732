"""A connector that takes every name of an image for its content, as flexkv's own does not: for a control."""

from __future__ import annotations

from typing import Any

from flexkv.adapters.vllm import FlexKVConnector
from flexkv.adapters.vllm.input_names import InputNames


class TrustingConnector(FlexKVConnector):
    """Its process is the engine's own, so nobody else loses what is replaced here."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        InputNames.first_of_run = lambda self, request: None  # type: ignore[method-assign]
        super().__init__(*arguments, **named)
