"""A connector for a control: it identifies an image by its name alone. flexkv's own connector does not do this."""

from __future__ import annotations

from typing import Any

from flexkv.adapters.vllm import FlexKVConnector
from flexkv.adapters.vllm.input_names import InputNames


class TrustingConnector(FlexKVConnector):
    """Replaces a method of flexkv in its process. The engine runs in a process of its own, so no other engine is
    affected."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        InputNames.first_of_run = lambda self, request: None  # type: ignore[method-assign]
        super().__init__(*arguments, **named)
