"""The settings that callers give in SGLang's requests: names with flexkv's prefix in `custom_params` of the sampling
parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from flexkv.adapters.common.settings_reader import Given, SettingsReader
from flexkv.adapters.sglang.engine_watch import EngineListener, add_to_extra_key
from flexkv.cache.keys import namespace_digest
from flexkv.facts.request_settings import NO_SETTINGS, PREFIX, RequestSettings

PLACE = "custom_params"

SERVED = ("skip_save", "skip_load", "max_load_tokens", "tiers", "ttl_s", "namespace")
"""The fields of `RequestSettings` that take effect in SGLang. A limit on stored tokens has no effect, because SGLang
always stores a complete node of its tree."""

SERVED_NAMES = tuple(PREFIX + name for name in SERVED)


class RequestBook(EngineListener):
    """The settings of an engine's live requests."""

    def __init__(self, reader: SettingsReader) -> None:
        self._reader = reader
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.inserting = NO_SETTINGS
        """The settings of the request whose KV the engine's radix tree is inserting; NO_SETTINGS if it inserts none."""

    def enter(self, request: Any) -> None:
        """Called whenever a request enters a queue. Reads the request's settings. If they contain a namespace, adds it
        to the request's extra key, which enters SGLang's page hashes and tree. Idempotent.
        """
        custom = getattr(request.sampling_params, PLACE, None)
        if not isinstance(custom, Mapping) or self._requests.get(request.rid) is request:
            return
        given: Given = {}
        self._reader.take_among(request.rid, PLACE, custom, given, SERVED_NAMES)
        if not given:
            return
        settings = request.flexkv_settings = replace(NO_SETTINGS, **given)
        self._requests[request.rid] = request
        if settings.namespace:
            name = f"flexkv-namespace-{namespace_digest({'named': settings.namespace}).hex()}"
            add_to_extra_key(request, name, name)

    def begin_insert(self, request: Any) -> None:
        self.inserting = getattr(request, "flexkv_settings", NO_SETTINGS)

    def of(self, rid: str) -> RequestSettings:
        """The settings of the request with this id; NO_SETTINGS if it gave none."""
        request = self._requests.get(rid)
        return NO_SETTINGS if request is None else request.flexkv_settings
