"""Loads pages from disk with one engine's adapter into the engine's pool, bypassing host memory, while
`stall_reads.cpp` stalls the reads of the pages' last layer. Does so twice: layer by layer, then all layers at once.
Prints as JSON, for each layer, whether the reads were still stalled when the forward could read the layer, and whether
all bytes were right.

    python -m tests.faults.layers_child vllm|sglang|tensorrt_llm FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from threading import Thread, Timer
from typing import Any

from flexkv.storage.header import read_header

WAIT_S = 60.0
LET_GO_S = 1.0
PAGES = [5, 9, 2, 7]


class Disk:
    """The slab in a folder, on which reads of one byte of each page can be stalled."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(None)
        self._library.stalled_reads.restype = ctypes.c_int64
        self._folder = folder
        self.is_stalled = False

    def stall(self, offset: int) -> None:
        """Stalls all reads that cover the byte at `offset` of a page, until `let_go` is called."""
        (slab,) = self._folder.rglob("*.slab")
        header = read_header(str(slab))
        self._library.stall_reads(*map(ctypes.c_int64, (header.header_bytes, header.slot_bytes, offset)))
        self.is_stalled = True

    def wait_for_stall(self) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not self._library.stalled_reads():
            assert time.monotonic() < ends_s, "no read of the last layer has begun"
            time.sleep(0.001)

    def let_go(self) -> None:
        self.is_stalled = False
        self._library.let_reads_go()


class Forward:
    """Records, each time the forward may read a layer, whether the reads of the last layer are still stalled.

    Args:
        by_layer: whether the reads continue after the forward has its first layer. Otherwise they continue `LET_GO_S`
            after the first of them has stalled.

    Attributes:
        waited: for each layer so far, whether reads were stalled.
    """

    def __init__(self, disk: Disk, by_layer: bool) -> None:
        self._disk, self._by_layer = disk, by_layer
        self.waited: list[bool] = []

    def begins(self) -> None:
        if not self._by_layer:
            Thread(target=self._let_go_later, daemon=True).start()

    def _let_go_later(self) -> None:
        self._disk.wait_for_stall()
        time.sleep(LET_GO_S)
        self._disk.let_go()

    def has(self, layer: int) -> None:
        is_first = layer == 0 and self._by_layer
        if is_first:
            self._disk.wait_for_stall()
        self.waited.append(self._disk.is_stalled)
        if is_first:
            Timer(0.1, self._disk.let_go).start()


SETTINGS: dict[str, Any] = {
    "disk.bytes_per_folder": "4MiB",
    "disk.compute_if_faster": False,
    "disk.gds": "on",
    # The preloaded library can stall only the calls that this kind of I/O uses.
    "disk.io": "threads",
}


def sglang(disk: Disk, folder: Path, by_layer: bool) -> tuple[list[bool], bool]:
    import torch

    from flexkv.adapters.sglang.load_batches import QueuedLoad
    from flexkv.transfer.graph import TransferGraph
    from tests.unit.sglang import conftest

    conftest.HEADS, conftest.HEAD_SIZE = 4, 64  # gives 4 KiB of K and of V per layer
    settings = SETTINGS | {"disk.folders": str(folder), "disk.gds_may_fail_requests": True}
    hashes = conftest.hashes_of(*PAGES)
    first = conftest.World(**settings)
    contents = [first.page(page) for page in PAGES]
    assert first.store(hashes, PAGES)
    first.cache.close()
    world = conftest.World(**settings)
    world.pool.zero_()
    disk.stall((2 * conftest.LAYERS - 1) * 4096)
    if not by_layer:
        TransferGraph.layerwise = lambda self: self  # type: ignore[method-assign]
    forward = Forward(disk, by_layer)
    forward.begins()
    keys = world.cache.keys(hashes)
    assert world.cache.match("r", keys, 0.0) == len(PAGES)
    targets = [page + 20 for page in PAGES]
    index = world.loads.start({"r": QueuedLoad(keys, conftest.blocks(targets))}, None)
    world.loads.set_consumer(index)
    right = True
    for layer in range(conftest.LAYERS):
        world.loads.wait_until(layer)
        forward.has(layer)
        for page, content in zip(targets, contents, strict=True):
            right &= torch.equal(world.page(page)[:, layer], content[:, layer])
    right &= world.loads.finish(index)
    world.cache.close()
    return forward.waited, right


def tensorrt_llm(disk: Disk, folder: Path, by_layer: bool) -> tuple[list[bool], bool]:
    from tests.unit.tensorrt_llm.pool import Shape
    from tests.unit.tensorrt_llm.world import PROMPT, WHOLE, World, arguments, settings

    shape = Shape(size=128)  # gives 4 KiB of K and of V per layer
    given = SETTINGS | {
        "disk.folders": str(folder),
        "disk.gds_may_fail_requests": True,
        "load.lookup_wait_s": WAIT_S,
        "load.mode": "layerwise" if by_layer else "sync",
    }
    variables = {
        f"FLEXKV_{name.replace('.', '_').upper()}": str(value).lower() for name, value in given.items()
    }
    variables["FLEXKV_DISK_FOLDERS"], variables["FLEXKV_DISK_BYTES_PER_FOLDER"] = str(folder), "4MiB"
    os.environ.update(settings(**variables))
    first = World(shape=shape, llm_args=arguments(cuda_graph_config=None))
    first.warm_up()
    first.serve(PROMPT)
    first.close()
    world = World(shape=shape, llm_args=arguments(cuda_graph_config=None))
    world.warm_up()
    disk.stall((2 * shape.layers - 1) * 4096)
    forward = Forward(disk, by_layer)
    forward.begins()
    request = world.request(PROMPT)
    world.executor.in_layer = forward.has
    world.executor.step()
    world.executor.in_layer = lambda layer: None
    world.executor.run()
    right = world.hit(request) == WHOLE and not world.executor.wrong
    world.check()
    world.close()
    return forward.waited, right


def vllm(disk: Disk, folder: Path, by_layer: bool) -> tuple[list[bool], bool]:
    from flexkv.adapters.vllm.engine_spec import EngineRole
    from tests.unit.adapters import mini_pools
    from tests.unit.adapters.mini_engine import MiniEngine
    from tests.unit.adapters.vllm_objects import make_request

    mini_pools.CONTENT = 256  # gives 8 KiB per layer
    prompt = list(range(100, 123))
    settings = SETTINGS | {
        "disk.folders": str(folder),
        "load.mode": "layerwise" if by_layer else "sync",
        "role": EngineRole(recomputes=True),
    }
    first = MiniEngine(**settings)
    first.run(make_request(prompt, "one"))
    first.close()
    engine = MiniEngine(**settings)
    disk.stall(8192 * mini_pools.LAYERS - 4096)
    forward = Forward(disk, by_layer)
    forward.begins()
    hit = engine.add(make_request(prompt, "two"))

    def in_the_forward() -> None:
        for layer in range(mini_pools.LAYERS):
            engine.workers[0].wait_for_layer(f"layer.{layer}")
            forward.has(layer)

    engine.step(before_forward=in_the_forward)
    engine.check("two")
    right = hit == 20 and not engine.invalid
    engine.close()
    return forward.waited, right


def main() -> None:
    engine, found = globals()[sys.argv[1]], {}
    for mode in ("by layer", "at once"):
        folder = Path(sys.argv[2]) / mode
        folder.mkdir()
        waited, right = engine(Disk(folder), folder, mode == "by layer")
        found[mode] = {"waited": waited, "right": right}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
