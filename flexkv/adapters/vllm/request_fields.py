"""Reads flexkv's settings for single requests from the fields of vLLM's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flexkv.adapters.common.settings_reader import Given, SettingsReader
from flexkv.config.names import shown
from flexkv.facts.request_settings import NAMES, PREFIX

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMS, EXTRA = "kv_transfer_params", "extra_args"

OF_OTHER_CONNECTORS = frozenset(
    (
        "dcp_size",
        "disagg_spec",
        "hidden_states_path",
        "is_request_leader",
        "pp_size",
        "prompt_token_ids",
        "tp_size",
        "transfer_id",
    )
)
STEMS_OF_OTHERS = ("do_remote_", "remote_")
"""`OF_OTHER_CONNECTORS` lists names, and `STEMS_OF_OTHERS` lists prefixes, of the fields in `kv_transfer_params` that
the other connectors of vLLM 0.32 and 0.33 read. Such a field is not a mistake: it may be meant for another connector of
a MultiConnector, or come from a proxy."""


class RequestFields:
    """Reads the settings that callers give in vLLM's requests. Callers give them in `kv_transfer_params` or in the
    `extra_args` of the sampling parameters (`vllm_xargs` over HTTP)."""

    def __init__(self, reader: SettingsReader) -> None:
        self._reader = reader

    def given(self, request: Request) -> Given:
        """Returns the settings that the request contains; in a streaming session, those of its last piece. Counts and
        logs settings that cannot be read."""
        sampling = request.sampling_params
        given: Given = {}
        if sampling is None:
            self._of_params(request.kv_transfer_params, request, given)
        elif extra := sampling.extra_args:
            # `request.kv_transfer_params` is not used, because in a session it keeps the parameters of the first piece.
            self._of_params(extra.get(PARAMS), request, given)
            self._reader.take_among(str(request.request_id), EXTRA, extra, given)
        return given

    def name_foreign(self, request: Request, namespace: str) -> None:
        """Counts and logs that a piece of a session has a namespace other than `namespace`, which the first piece
        has."""
        allowed = f"{shown(namespace)}, the session's first; the piece is neither stored nor loaded"
        self._reader.warn(str(request.request_id), f"{PREFIX}namespace", "another", "value", allowed)

    def _of_params(self, params: object, request: Request, given: Given) -> None:
        if params is None:
            return
        if not isinstance(params, Mapping):
            self._reader.warn(str(request.request_id), PARAMS, params, "type", "a mapping")
            return
        for name, value in params.items():
            if name in NAMES:
                self._reader.take(str(request.request_id), PARAMS, name, value, given)
            elif not is_of_others(name):
                self._reader.name_unknown(str(request.request_id), PARAMS, name, value)


def is_of_others(name: object) -> bool:
    """Whether another connector of vLLM reads this field of `kv_transfer_params`."""
    return isinstance(name, str) and (name in OF_OTHER_CONNECTORS or name.startswith(STEMS_OF_OTHERS))
