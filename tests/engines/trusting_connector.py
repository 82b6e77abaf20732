"""A connector for a control: it identifies an image by its name, which flexkv's own connector does not do."""

from __future__ import annotations

from typing import Any

from flexkv.adapters.vllm import FlexKVConnector
from flexkv.adapters.vllm.input_names import InputNames


class TrustingConnector(FlexKVConnector):
    """Runs in the engine's own process, so that the replaced functions affect no other engine."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        InputNames.first_of_run = lambda self, request: None  # type: ignore[method-assign]
        super().__init__(*arguments, **named)
