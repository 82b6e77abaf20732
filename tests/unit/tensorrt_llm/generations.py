"""Writes packages named tensorrt_llm that contain only the connector's base classes, as three generations define them.

G1 is versions 1.1 and 1.2, G2 is version 1.3, and G3 came later. Each generation has its own module, abstract methods,
fields of `RequestData`, and names that a connector may use from the package.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

GENERATIONS = ("g1", "g2", "g3")

WORKER_ABSTRACT = (
    "register_kv_caches(self, kv_cache_tensor)",
    "start_load_kv(self, stream)",
    "wait_for_layer_load(self, layer_idx, stream)",
    "save_kv_layer(self, layer_idx, stream)",
    "wait_for_save(self, stream)",
    "get_finished(self, finished_gen_req_ids, started_loading_req_ids)",
)
SCHEDULER_ABSTRACT = (
    "build_connector_meta(self, scheduler_output)",
    "get_num_new_matched_tokens(self, request, num_computed_tokens)",
    "request_finished(self, request, cache_block_ids)",
    "update_state_after_alloc(self, request, block_ids)",
)

ALL = """\
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass
class RequestData:
    request_id: int
    new_tokens: list
    new_block_ids: list
    computed_position: int
    num_scheduled_tokens: int
{fields}

@dataclass
class SchedulerOutput:
    new_requests: list = field(default_factory=list)
    cached_requests: list = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args):
        self._llm_args = llm_args
        self._metadata = None

    def bind_connector_meta(self, metadata):
        self._metadata = metadata

    def get_connector_meta(self):
        return self._metadata

    def register_forward_pass_callable(self):
        pass

{worker}

class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args):
        self._llm_args = llm_args

{scheduler}
"""

FIELDS = {
    "g1": "",
    "g2": """\
        priorities: list | None = None
        cache_salt_id: int | None = None
        """,
    "g3": """\
        block_hashes: list = field(default_factory=list)
        priorities: list | None = None
        cache_salt: str | None = None
        new_block_ids_by_layer_group: list = field(default_factory=list)
        """,
}
# Methods for which a generation's base class has defaults. G3's defaults raise or do nothing, so a connector needs its
# own methods.
WORKER_DEFAULTS = {
    "g1": "",
    "g2": "",
    "g3": """\
        supports_attention_dp = False

        def register_kv_cache_layout(self, layout):
            raise NotImplementedError
        """,
}
SCHEDULER_DEFAULTS = {
    "g1": "",
    "g2": """\
        def wait_for_initialization(self):
            pass
        """,
    "g3": """\
        supports_attention_dp = False

        def wait_for_initialization(self):
            pass

        def request_finished_by_layer_group(self, request, cache_block_ids_by_layer_group):
            raise NotImplementedError

        def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
            raise NotImplementedError

        def cancel_load(self, request, start, end):
            raise NotImplementedError

        def request_reset(self, request):
            raise NotImplementedError
        """,
}
FLAT_PLACE = "_torch/pyexecutor"
PLACES = {"g1": FLAT_PLACE, "g2": f"{FLAT_PLACE}/connectors", "g3": f"{FLAT_PLACE}/connectors"}


def write_package(folder: Path, generation: str, rank: int = 0) -> None:
    """Writes the package below `folder`. The caller must then add `folder` to Python's search path."""
    place = folder / "tensorrt_llm" / PLACES[generation]
    place.mkdir(parents=True)
    for parent in (place, *place.parents):
        if parent == folder:
            break
        (parent / "__init__.py").touch()
    (folder / "tensorrt_llm" / "__init__.py").write_text('__version__ = "1.3.0"\n')
    (folder / "tensorrt_llm" / "_utils.py").write_text(f"def mpi_rank():\n    return {rank}\n")
    source = ALL.format(
        fields=_body(FIELDS[generation]),
        worker=_body(_abstract(WORKER_ABSTRACT) + dedent(WORKER_DEFAULTS[generation])),
        scheduler=_body(_abstract(SCHEDULER_ABSTRACT) + dedent(SCHEDULER_DEFAULTS[generation])),
    )
    (place / "kv_cache_connector.py").write_text(source)


def _abstract(signatures: tuple[str, ...]) -> str:
    return "".join(f"@abstractmethod\ndef {signature}: ...\n\n" for signature in signatures)


def _body(source: str) -> str:
    return indent(dedent(source), "    ")
