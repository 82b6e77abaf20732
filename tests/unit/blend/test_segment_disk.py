"""Segments on disk are used by later processes, may take more space than host memory has, and are misses if they are
damaged.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from flexkv.blend import BlendPlan, precompute, prefill  # noqa: E402
from flexkv.blend.cache import SegmentCache  # noqa: E402
from flexkv.blend.keys import GROUP, SHAPE  # noqa: E402
from flexkv.cache.keys import EngineKeyChain, TokenChain, namespace_digest  # noqa: E402
from flexkv.errors import DiskError  # noqa: E402
from flexkv.storage.folder import FolderLockedError  # noqa: E402
from flexkv.storage.header import read_header  # noqa: E402
from flexkv.transfer.graph import OpKind, TransferGraph  # noqa: E402
from tests.unit.blend.blend_world import (  # noqa: E402
    ROUNDING,
    make_cache,
    make_model,
    random_segments,
    relative,
)
from tests.unit.blend.segment_child import LENGTHS, disk  # noqa: E402
from tests.unit.blend.stored_pages import publish  # noqa: E402
from tests.unit.cache.disk_world import disk_tier  # noqa: E402

RATIO_0 = BlendPlan.of_ratio(0.0)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def open_cache(tmp_path: Path, model):
    """Returns a function that opens a cache on this test's folder, after closing the previous one."""
    caches: list[SegmentCache] = []

    def open_again(**options: Any) -> SegmentCache:
        if caches:
            end(caches.pop())
        caches.append(make_cache(model, disk=disk(str(tmp_path)), **options))
        return caches[-1]

    yield open_again
    for cache in caches:
        end(cache)


def end(cache: SegmentCache) -> None:
    cache.begin_load([None]).close()
    cache.unit.wait_while(lambda: cache.manager.work.moving, 60.0)
    cache.manager.check_integrity()
    cache.close()


def moved(segments: list[np.ndarray]) -> list[np.ndarray]:
    return [segments[2], segments[0], segments[1], segments[3]]


# --- a later process ---


def live(folder: Path, life: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "tests.unit.blend.segment_child", str(folder), life]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("life", "status"), [pytest.param("close", 0, marks=pytest.mark.long), ("kill", -signal.SIGKILL)]
)
def test_the_next_process_has_them(tmp_path: Path, model, cache, life: str, status: int) -> None:
    live(tmp_path, life, status)
    found = json.loads(live(tmp_path, "answer").splitlines()[-1])
    segments = random_segments(LENGTHS)
    precompute(model, segments[:3], cache)
    wanted = prefill(model, moved(segments), cache, RATIO_0)
    assert found["cached"] == [*LENGTHS[:3], 0]
    assert found["reused"] == wanted.report.reused == sum(LENGTHS[:3])
    assert found["lost"] == []
    assert found["logits"] == wanted.logits[0].tolist(), "bit for bit what host memory gives"
    # The three segments have 3, 5 and 2 pages of 8 tokens.
    assert found["read"] == 10


# --- beyond host memory ---


def test_what_host_memory_has_lost_comes_from_disk(
    model, cache, open_cache: Callable[..., SegmentCache]
) -> None:
    segments = random_segments([20, 33, 17, 24, 9])
    precompute(model, segments[:4], cache)
    wanted = prefill(model, segments, cache, RATIO_0)
    # The four segments have 14 pages. Host memory has slots for 8 of them.
    small = open_cache(slots=8)
    for segment in segments[:4]:
        assert precompute(model, [segment], small) == len(segment)
        assert small.flush()  # writes in flight hold slots that the next store or lookup needs
    assert small.cached_tokens(segments[0]) == 20
    two = [segments[0], segments[1][:8], segments[4]]
    found = prefill(model, two, small, RATIO_0)
    assert found.report.reused == 28
    assert torch.equal(found.logits, prefill(model, two, cache, RATIO_0).logits)
    # If a prompt has more pages than host memory has slots, the model computes the tokens of the pages that do not fit.
    found = prefill(model, segments, small, RATIO_0)
    assert 0 < found.report.reused < wanted.report.reused
    assert found.report.lost == ()


def test_precompute_after_a_restart_computes_nothing_and_reads_nothing(
    model, open_cache: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = random_segments(LENGTHS)[:3]
    precompute(model, segments, open_cache())
    cache = open_cache()
    with monkeypatch.context() as patched:
        patched.setattr(model, "forward", None)
        assert precompute(model, segments, cache) == sum(LENGTHS[:3])
    assert disk_tier(cache.manager).counts.read == 0
    assert not cache.manager.work.moving


def test_whole_blocks_are_read_layer_by_layer_and_promised_before(
    model, open_cache: Callable[..., SegmentCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = random_segments(LENGTHS)
    precompute(model, segments[:3], open_cache())
    cache = open_cache()
    graphs: list[TransferGraph] = []
    plane = disk_tier(cache.manager).plane
    assert plane is not None
    submit = plane.submit

    def noting(graph: TransferGraph) -> int | None:
        graphs.append(graph)
        return submit(graph)

    monkeypatch.setattr(plane, "submit", noting)
    assert prefill(model, moved(segments), cache, RATIO_0).report.reused == 69
    reads = [op for graph in graphs for op in graph.ops if op.kind is OpKind.DISK_READ]
    # The partial tails of 4 tokens and of 1 token are read first, as complete pages. The full blocks are read layer by
    # layer.
    assert [(op.pages, op.layerwise) for op in reads] == [
        (1, False),
        (1, False),
        (2, True),
        (2, True),
        (4, True),
    ]
    assert cache.manager.stats().streamed_pages == 8


# --- damage ---


def slab_of(folder: Path) -> Path:
    (slab,) = folder.rglob("*.slab")
    return slab


def flip(slab: Path, at: int) -> None:
    with slab.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x40]))


def place_of(cache: SegmentCache, segment: np.ndarray, block: int) -> int:
    """Returns the disk slot of block `block` of a segment."""
    index = disk_tier(cache.manager).presence
    entries = index.find(GROUP, cache.scheme.keys(segment).whole)
    return int(index.slots_of(entries)[block])


class Damage:
    """Methods that damage the slot image at `place` in a slab. `other` is the disk slot of another page's image."""

    def __init__(self, slab: Path, place: int, other: int) -> None:
        header = read_header(str(slab))
        self.slab, self.image = slab, header.slot_bytes
        self.start = header.header_bytes + place * self.image
        self.other = header.header_bytes + other * self.image

    def data(self) -> None:
        # The byte is in the third layer. A layer's K and V of 8 tokens, with 2 heads of 16 floats, have 2048 bytes.
        flip(self.slab, self.start + 2 * 2048 + 77)

    def trailer(self) -> None:
        flip(self.slab, self.start + 4 * 2048 + 4)

    def another_page(self) -> None:
        with self.slab.open("r+b") as file:
            file.seek(self.other)
            image = file.read(self.image)
            file.seek(self.start)
            file.write(image)

    def zeros(self) -> None:
        with self.slab.open("r+b") as file:
            file.seek(self.start)
            file.write(bytes(self.image))


@pytest.mark.parametrize(
    ("damage", "miss"),
    [("data", "data"), ("trailer", "trailer"), ("another_page", "elsewhere"), ("zeros", "trailer")],
)
def test_a_damaged_page_is_a_miss_with_a_name(
    model, tmp_path: Path, open_cache: Callable[..., SegmentCache], damage: str, miss: str
) -> None:
    segments = random_segments(LENGTHS)
    first = open_cache()
    precompute(model, segments[:3], first)
    assert first.flush()
    broken = Damage(slab_of(tmp_path), place_of(first, segments[1], 2), place_of(first, segments[0], 0))
    with make_other(model, [segments[0], segments[2]]) as other:
        wanted = prefill(model, moved(segments), other, RATIO_0)
    open_cache()  # closes the first cache, which would otherwise write its pages later
    getattr(broken, damage)()
    cache = open_cache()
    found = prefill(model, moved(segments), cache, RATIO_0)
    assert {name: count for name, count in cache.unit.misses.items() if count} == {miss: 1}
    (lost,) = found.report.lost
    assert lost.startswith("segment 2: ")
    assert "read" in lost
    assert found.report.reused == 36
    assert relative(found.logits, wanted.logits) < ROUNDING
    # The two blocks before the damaged one are still found. After the segment has been computed again, the next cache
    # finds all blocks.
    assert cache.cached_tokens(segments[1]) == 16
    assert precompute(model, segments[1:2], cache) == 33
    cache = open_cache()
    again = prefill(model, moved(segments), cache, RATIO_0)
    assert again.report.lost == ()
    assert again.report.reused == 69


def test_control_without_verification_the_answer_would_be_another(
    model, tmp_path: Path, open_cache: Callable[..., SegmentCache]
) -> None:
    """As a control, wrong numbers are stored for a segment, together with digests that match them. So the check of the
    digests finds no fault, and the wrong numbers are loaded and change the answer.
    """
    segments = random_segments(LENGTHS)
    cache = open_cache()
    precompute(model, segments[:3], cache)
    right = prefill(model, moved(segments), cache, RATIO_0)
    keys = cache.scheme.keys(segments[1])
    assert cache.manager.forget(GROUP, keys.whole) > 0
    from flexkv.blend.runner.blender import Blender
    from flexkv.blend.runner.model import LayeredModel

    wrong = torch.full((2, 33, 16), 3.0)
    cache.store(segments[1], lambda layer: (wrong, wrong), Blender(LayeredModel(model), RATIO_0).rotation)
    found = prefill(model, moved(segments), cache, RATIO_0)
    assert relative(found.logits, right.logits) > 0.05


def make_other(model, segments: list[np.ndarray]):
    from contextlib import contextmanager

    @contextmanager
    def made():
        cache = make_cache(model)
        precompute(model, segments, cache)
        yield cache
        cache.close()

    return made()


def test_a_slab_that_was_cut_off_costs_its_pages(
    model, tmp_path: Path, open_cache: Callable[..., SegmentCache]
) -> None:
    segments = random_segments(LENGTHS)
    first = open_cache()
    precompute(model, segments[:3], first)
    cache = open_cache()
    slab = slab_of(tmp_path)
    header = read_header(str(slab))
    with slab.open("r+b") as file:
        file.truncate(header.header_bytes + 3 * header.slot_bytes)
    found = prefill(model, moved(segments), cache, RATIO_0)
    assert cache.unit.misses["short"] > 0
    assert found.report.lost
    assert found.report.reused + 9 < 78
    cold = make_cache(model)
    wanted = prefill(model, moved(segments), cold, BlendPlan.of_ratio(1.0))
    everything = prefill(model, moved(segments), cache, BlendPlan.of_ratio(1.0))
    assert relative(everything.logits, wanted.logits) < ROUNDING
    cold.close()


# --- pages of segments and of prefixes ---


def test_segments_and_prefixes_share_an_index_and_a_folder(
    model, open_cache: Callable[..., SegmentCache]
) -> None:
    """Segments and prefixes can share an index and a folder. The same tokens are stored as a segment and as a prefix.
    After a restart, neither kind of key finds pages of the other kind.
    """
    text = random_segments([32])[0]
    cache = open_cache()
    fields = {"weights": "random", SHAPE: str(cache.shape)}
    chain = TokenChain(8)
    chain.extend(text)
    prefix = EngineKeyChain(namespace_digest(fields), GROUP)
    prefix.extend(chain.digests)
    blocks = cache.staging.take(4)
    assert blocks is not None
    cache.staging.rows[:, blocks] = 7
    publish(cache, prefix.keys, blocks, 0, 8)
    assert cache.cached_tokens(text) == 0
    cache = open_cache()
    assert cache.manager.present(GROUP, prefix.keys).all()
    assert cache.cached_tokens(text) == 0
    assert prefill(model, [text, [1, 2]], cache, RATIO_0).report.reused == 0
    assert precompute(model, [text], cache) == 32
    cache = open_cache()
    assert cache.manager.present(GROUP, prefix.keys).all()
    assert prefill(model, [text, [1, 2]], cache, RATIO_0).report.reused == 32
    load = cache.begin_load([text])
    rows = np.zeros((2, 32, 2, 16), np.uint32)
    load.copy_layer(load.hits[0], 3, rows)
    assert not (rows == 7).all(), "the segment's bytes are its own"
    load.close()


def test_other_weights_have_other_folders_and_one_cache_uses_a_folder(
    model, tmp_path: Path, open_cache: Callable[..., SegmentCache]
) -> None:
    segments = random_segments(LENGTHS)
    cache = open_cache()
    precompute(model, segments[:3], cache)
    with pytest.raises(FolderLockedError, match="in use by process"):
        make_cache(model, disk=disk(str(tmp_path)))
    other_model = make_model("qwen3")
    other = make_cache(other_model, disk=disk(str(tmp_path)))
    assert other.cached_tokens(segments[0]) == 0
    other.close()
    with pytest.raises(DiskError, match="/proc/flexkv"):
        make_cache(make_model("mistral"), disk=disk("/proc/flexkv"))
