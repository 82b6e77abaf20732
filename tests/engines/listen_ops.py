"""Operations that record the calls between the engine's scheduler and its connector."""

from __future__ import annotations

from typing import Any

from demo.engine_child import Operation


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def connector_says(llm: Any) -> dict[str, Any]:
    """Returns the connector's answer when the scheduler asks whether it has work left."""
    connector = _scheduler(llm).connector
    return {
        "requires_kv_delivery": connector.requires_kv_delivery,
        "pending_block_frees": connector.has_pending_block_frees(),
        "pending_push_work": connector.has_pending_push_work(),
    }


def watch_events(llm: Any) -> dict[str, Any]:
    """Begins to record the KV events that the scheduler publishes. Drops earlier records."""
    scheduler = _scheduler(llm)
    scheduler.seen_events = []
    scheduler.kv_event_publisher.publish = lambda batch: scheduler.seen_events.extend(batch.events)
    return {}


def seen_events(llm: Any) -> dict[str, Any]:
    """Returns the KV events since `watch_events` was called. For each event, gives its kind and the fields that
    identify the block."""
    return {"events": [_plain(event) for event in _scheduler(llm).seen_events]}


def _plain(event: Any) -> dict[str, Any]:
    return {
        "kind": type(event).__name__,
        "medium": getattr(event, "medium", None),
        "hashes": [_hash(item) for item in getattr(event, "block_hashes", ())],
        "parent": _hash(getattr(event, "parent_block_hash", None)),
        "tokens": list(getattr(event, "token_ids", ())),
    }


def _hash(value: Any) -> str | None:
    return value.hex() if isinstance(value, bytes) else None if value is None else str(value)


OPERATIONS: dict[str, Operation] = {
    "connector_says": connector_says,
    "watch_events": watch_events,
    "seen_events": seen_events,
}
