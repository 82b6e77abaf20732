"""Fields for flexkv that a caller sets in one request: reads them, and keeps the tokens that they exclude out of the
cache.

vLLM checks no field of a connector while a request can still be refused, and an exception in its scheduler ends the
engine and every request. So a field that cannot be read never fails its request: a warning names the field, and a
counter counts it. A value of `skip_save` that cannot be read keeps the request out of the cache, because its caller has
asked for something other than a plain no, and a store cannot be undone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexkv.config.names import shown
from flexkv.observe import Counters

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMS, EXTRA = "kv_transfer_params", "extra_args"
SKIP_SAVE = "skip_save"
PREFIX = "flexkv."
"""Prefix of flexkv's fields in the sampling parameters' `extra_args` (`vllm_xargs` over HTTP)."""

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
"""Fields of `kv_transfer_params` that connectors of vLLM 0.32 and 0.33 read, or their prefixes. In a MultiConnector, or
behind a proxy, such fields are no mistake."""

WORDS = {"true": True, "false": False}
ALLOWED = "true, false, 1 or 0"
NO_END = sys.maxsize
WARN_EVERY_S = 60.0


@dataclass(slots=True)
class KeptOut:
    """The tokens of a request that its caller keeps out of the cache; in a streaming session each piece may ask for it.
    A page that holds such a token is not stored.

    Attributes:
        spans: ranges [first, end) of tokens, ascending; the last may have no end yet.
    """

    spans: list[list[int]] = field(default_factory=list)

    def ask(self, skip: bool, first: int, end: int) -> None:
        """Begins a piece.

        Args:
            skip: the piece's tokens are kept out.
            first: a position before which the piece has no token.
            end: a position from which on the piece before has no token.
        """
        if skip == self.asked:
            return
        if skip:
            self.spans.append([first, NO_END])
        else:
            self.spans[-1][1] = end

    @property
    def asked(self) -> bool:
        """Whether the last piece is kept out."""
        return bool(self.spans) and self.spans[-1][1] == NO_END

    def within(self, first: int, end: int) -> tuple[int, int] | None:
        """The first span that overlaps the tokens [first, end); None where all of them may be stored."""
        return next(((low, high) for low, high in self.spans if low < end and high > first), None)


class RequestFields:
    """Reads flexkv's fields of requests.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(
        self, counters: Counters, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._counters = counters
        self._logger = logger
        self._clock = clock
        self._warned_s: float | None = None
        self._left_out = 0

    def skip_save(self, request: Request) -> bool | None:
        """Whether the caller asks that nothing of this request, or of this piece of a session, be stored; None if the
        caller does not say. Counts and logs fields that cannot be read.

        `kv_transfer_params={"skip_save": true}`, or `flexkv.skip_save` in the sampling parameters' extra_args.
        """
        sampling = request.sampling_params
        extra = (sampling.extra_args if sampling is not None else None) or {}
        # When a session goes on, `request.kv_transfer_params` still has the parameters of its first piece.
        params = extra.get(PARAMS) if sampling is not None else request.kv_transfer_params
        asked = [*self._of_params(params, request), *self._of_extra(extra, request)]
        return any(asked) if asked else None

    def _of_params(self, params: object, request: Request) -> Iterator[bool]:
        if params is None:
            return
        if not isinstance(params, Mapping):
            self._warn(request, PARAMS, params, "type", "a mapping")
            return
        for name, value in params.items():
            if name == SKIP_SAVE:
                yield self._flag(request, f"{PARAMS}.{name}", value)
            elif not is_of_others(name):
                self._warn(request, f"{PARAMS}.{shown(name)}", value, "name", SKIP_SAVE)

    def _of_extra(self, extra: Mapping[str, Any], request: Request) -> Iterator[bool]:
        for name, value in extra.items():
            if not str(name).startswith(PREFIX):
                continue
            if name == PREFIX + SKIP_SAVE:
                yield self._flag(request, f"{EXTRA}.{name}", value)
            else:
                self._warn(request, f"{EXTRA}.{shown(name)}", value, "name", PREFIX + SKIP_SAVE)

    def _flag(self, request: Request, place: str, value: object) -> bool:
        if value is None:
            return False
        if isinstance(value, str) and value.lower() in WORDS:
            return WORDS[value.lower()]
        if isinstance(value, (bool, int, float)) and value in (0, 1):
            return bool(value)
        self._warn(request, place, value, "value", f"{ALLOWED}; the request is not stored")
        return True

    def _warn(self, request: Request, place: str, value: object, what: str, allowed: str) -> None:
        self._counters.add("flexkv_unread_request_fields_total", 1, reason=what)
        now_s = self._clock()
        if self._warned_s is not None and now_s - self._warned_s < WARN_EVERY_S:
            self._left_out += 1
            return
        more = f"; {self._left_out} more since the last warning" if self._left_out else ""
        self._warned_s, self._left_out = now_s, 0
        self._logger.warning(
            "request %s: %s is %s: flexkv does not know this %s; allowed: %s%s",
            request.request_id,
            place,
            shown(value),
            what,
            allowed,
            more,
        )


def is_of_others(name: object) -> bool:
    """Whether another connector of vLLM reads this field of `kv_transfer_params`."""
    return isinstance(name, str) and (name in OF_OTHER_CONNECTORS or name.startswith(STEMS_OF_OTHERS))
