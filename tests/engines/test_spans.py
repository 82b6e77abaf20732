"""Tracing in a real engine: spans of flexkv's ops reach the engine's collector and carry the engine's request ids."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from demo.engine_process import SEPARATE_CORE, EngineProcess

from .conftest import UNPINNED, connector, engine_arguments
from .session import BLOCK_TOKENS, EngineSession, Prompt, Reference

ARRIVE_S = 60.0
Spans = dict[str, list[dict[str, str | int]]]


class Collector(ThreadingHTTPServer):
    """A server that receives spans over OTLP/HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Export)
        self.requests: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> Spans:
        """Returns the attributes of all spans received so far, by the name of the span."""
        found: Spans = {}
        for request in list(self.requests):
            for resource in ExportTraceServiceRequest.FromString(request).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        attributes = {
                            a.key: a.value.string_value or a.value.int_value for a in span.attributes
                        }
                        found.setdefault(span.name, []).append(attributes)
        return found


class _Export(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.requests.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Logs nothing, to keep the test's output clean."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def arrived(collector: Collector, name: str, count: int = 1) -> list[dict[str, str | int]]:
    ends_s = time.monotonic() + ARRIVE_S
    while len((spans := collector.spans()).get(name, [])) < count:
        assert time.monotonic() < ends_s, f"fewer than {count} {name!r} among {sorted(spans)}"
        time.sleep(0.1)
    return spans[name]


def test_ops_are_spans_beside_the_engines_own(
    model: Path, reference: Reference, tmp_path: Path, stream: int, collector: Collector
) -> None:
    arguments = engine_arguments(model) | {
        "kv_transfer_config": connector(),
        "otlp_traces_endpoint": collector.url,
    }
    environment = {
        **UNPINNED,
        **SEPARATE_CORE,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with EngineProcess(arguments, tmp_path / "engine.log", environment=environment) as process:
        session = EngineSession(process, reference)
        prompt = Prompt.of(400, stream)
        pages = prompt.whole_blocks // BLOCK_TOKENS
        session.check_one(prompt)
        stores = arrived(collector, "flexkv store to host memory")
        assert sum(int(span["flexkv.pages"]) for span in stores) >= pages
        assert session.call("reset")["done"]
        assert session.check_one(prompt).cached == prompt.whole_blocks
        (load,) = arrived(collector, "flexkv load from host memory")
        assert (load["flexkv.pages"], load["flexkv.failed_pages"]) == (pages, 0)
        own = [str(span["gen_ai.request.id"]) for span in arrived(collector, "llm_request", count=2)]
        # The engine's id of a request is the front end's id plus a suffix.
        assert any(str(load["gen_ai.request.id"]).startswith(name) for name in own), (load, own)
