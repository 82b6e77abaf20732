"""An adapter's name in flexkv identifies its content. The name changes when the adapter is trained again, but not with
the adapter's path, a copy, or file times.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import vllm.v1.engine.core as engine_core
from vllm.lora.request import LoRARequest

from flexkv.adapters.common import lora_names
from flexkv.adapters.common.lora_names import MOST_NAMED_BYTES, LoraNames, content_before
from flexkv.adapters.vllm import adapter_loads
from flexkv.adapters.vllm.adapter_loads import adapter_names
from flexkv.adapters.vllm.metadata import WorkerMetadata
from flexkv.errors import ConfigError
from flexkv.facts.keys import Keys
from flexkv.weights.files import process_start_ns
from tests.unit.adapters.mini_engine import MiniEngine
from tests.unit.adapters.vllm_objects import lora, make_request

PROMPT = list(range(100, 120))
HIT = 19
LATER_NS = 60 * 10**9
DEADLINE_S = 60.0


def write(folder: Path, weights: bytes = b"one", settings: bytes = b'{"r": 8}') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights * 5000)
    (folder / "adapter_config.json").write_bytes(settings)
    return folder


def names() -> LoraNames:
    """Returns the `LoraNames` of an engine that seems to have started when all of the test's files were already old."""
    return LoraNames(time.time_ns() + LATER_NS)


def wait_for_clock(folder: Path, moment_ns: int) -> None:
    """Waits until a new file would get a time later than `moment_ns`. File times advance in milliseconds."""
    probe = folder / "probe"
    ends_s = time.monotonic() + DEADLINE_S
    while True:
        probe.touch()
        if probe.stat().st_ctime_ns > moment_ns:
            return
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def test_the_same_content_has_one_name_in_every_process_and_folder(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a"), write(tmp_path / "b")
    assert names().name(str(one)) == names().name(str(one)) == names().name(str(two))
    assert not names().name(str(one)).startswith("run:")


@pytest.mark.parametrize("change", [{"weights": b"two"}, {"settings": b'{"r": 16}'}])
def test_other_weights_or_another_configuration_is_another_adapter(
    tmp_path: Path, change: dict[str, bytes]
) -> None:
    before = names().name(str(write(tmp_path / "a")))
    assert names().name(str(write(tmp_path / "a", **change))) != before


def test_what_changed_after_the_start_is_of_this_run_alone(tmp_path: Path) -> None:
    """If an adapter's files change after the start, its name is valid only in this run. The engine may have the old
    content, the new content, or a different one for each request.
    """
    folder = write(tmp_path / "a")
    old = os.stat(folder / "adapter_model.safetensors")
    start_ns = time.time_ns() + 1
    known = LoraNames(start_ns)
    assert not known.name(str(folder)).startswith("run:")
    wait_for_clock(tmp_path, start_ns)
    assert not known.has_changed(str(folder)), "the control"
    shutil.copy(folder / "adapter_config.json", folder / "adapter_model.safetensors")
    # The change is noticed even if the file's modification time stays the same.
    os.utime(folder / "adapter_model.safetensors", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert known.has_changed(str(folder))
    seen = LoraNames(start_ns).name(str(folder))
    assert seen.startswith("run:")
    assert LoraNames(start_ns).name(str(folder)) != seen


def test_what_changed_between_the_start_and_its_name_is_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If an adapter's files change between the engine's start and flexkv's first look at them, no KV is cached for it.
    The engine may have loaded the former content, and loads the new one after it has evicted the adapter.
    """
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    folder = write(tmp_path / "a")
    known = LoraNames(0)
    assert known.name(str(folder)).startswith("run:")
    assert known.has_changed(str(folder))
    [record] = caplog.records
    assert "nothing is stored or loaded for it in this run" in record.getMessage()
    seen = LoraNames(0, sees_loads=True)
    assert seen.name(str(folder)).startswith("content:"), "no engine has read it before"
    assert not seen.has_changed(str(folder)), "the control"
    write(folder, b"two")
    assert seen.has_changed(str(folder))


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "control"])
def test_an_adapter_is_named_before_vllm_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """flexkv names an adapter before vLLM's `add_lora` loads it, so it notices that the files change before the first
    request. In the control, flexkv does not see the load.
    """
    folder = write(tmp_path / "adapter")
    request = LoRARequest(lora_name="x", lora_int_id=1, lora_path=str(folder))
    if not seen:
        monkeypatch.setattr(adapter_loads, "_names", [])
    known = adapter_names() if seen else LoraNames(sees_loads=True)
    named: list[bool] = []

    def load(loaded: LoRARequest) -> bool:
        named.append(loaded.lora_path in known._named)
        return True

    core: Any = SimpleNamespace(model_executor=SimpleNamespace(add_lora=load))
    assert engine_core.EngineCore.add_lora(core, request)
    assert named == [seen]
    write(folder, b"two")
    known.name(str(folder))
    assert known.has_changed(str(folder)) is seen


def test_an_adapter_comes_as_a_list_from_another_process(tmp_path: Path) -> None:
    """An adapter that another process sends as a list reaches `add_lora` as a `LoRARequest`. The engine's core converts
    the list according to the signature of `add_lora`, so flexkv's replacement of `add_lora` must keep the signature.
    """
    known = adapter_names()
    request = LoRARequest(lora_name="x", lora_int_id=1, lora_path=str(write(tmp_path / "adapter")))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    assert isinstance(received, list)
    core: Any = object.__new__(engine_core.EngineCoreProc)
    core.model_executor = SimpleNamespace(add_lora=lambda loaded: loaded == request)
    arguments = engine_core.EngineCoreProc._convert_msgspec_args(core.add_lora, [received])
    assert core.add_lora(*arguments)
    assert request.lora_path in known._named


def test_a_vllm_without_that_method_leaves_adapters_that_changed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, adapter_loads.ENGINE, ModuleType(adapter_loads.ENGINE))
    known, folder = adapter_names(), write(tmp_path / "adapter")
    known.name(str(folder))
    assert known.has_changed(str(folder))


def test_what_is_not_here_is_of_this_run_alone(tmp_path: Path) -> None:
    known = names()
    assert known.name("somebody/adapter").startswith("run:")
    assert known.name("somebody/adapter") == known.name("somebody/adapter")
    assert names().name("somebody/adapter") != known.name("somebody/adapter")
    (tmp_path / "empty").mkdir()
    assert known.name(str(tmp_path / "empty")).startswith("run:")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), OSError("disk"), MemoryError(), ConfigError("no weights")],
)
def test_an_adapter_that_cannot_be_read_is_of_this_run_alone_and_one_warning(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If an adapter cannot be read, its name is valid only in this run, and one warning is logged. A lookup in the
    engine's scheduler asks for the name, so an error must not reach the scheduler.
    """

    def fail(*_: Any) -> str:
        raise error

    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    monkeypatch.setattr(lora_names, "whole_identity", fail)
    known, folder = names(), write(tmp_path / "a")
    first = known.name(str(folder))
    assert first.startswith("run:")
    assert known.name(str(folder)) == first
    [record] = caplog.records
    assert str(error) in record.getMessage()
    assert "this run only" in record.getMessage()


@pytest.mark.parametrize("path", ["~nobody-of-this-name/adapter", "nul\0in it", "", "a" * 5000])
def test_a_path_that_no_file_can_have_is_of_this_run_alone(path: str) -> None:
    assert names().name(path).startswith("run:")


def test_no_more_is_read_than_fits_the_wait_of_a_request(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(MOST_NAMED_BYTES)
    assert names().name(str(folder)).startswith("content:"), "the control"
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(MOST_NAMED_BYTES + 1)
    assert names().name(str(folder)).startswith("run:")
    assert MOST_NAMED_BYTES <= 128 << 20


def download(repository: Path, weights: bytes = b"one", adapter: str = "") -> Path:
    """Writes an adapter as the cache of the Hugging Face hub stores it: links to files whose names are digests of their
    content.
    """
    held = write(repository / "blobs", weights)
    folder = repository / "snapshots" / ("a" * 40) / adapter
    folder.mkdir(parents=True)
    for file in list(held.glob("adapter_*")):
        content = file.read_bytes()
        by_git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        name = by_git if file.suffix == ".json" else hashlib.sha256(content).hexdigest()
        blob = file.rename(held / name)
        (folder / file.name).symlink_to(os.path.relpath(blob, folder))
    return folder


def test_a_commit_of_the_hub_may_be_downloaded_after_the_start(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    assert content_before(download(tmp_path / "hub"), 0).startswith("content:")
    with pytest.raises(ConfigError, match="changed after the engine's start"):
        content_before(write(tmp_path / "a"), 0)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("through_the_link", [True, False])
def test_a_commit_that_was_edited_is_like_any_folder(
    tmp_path: Path, file: str, through_the_link: bool
) -> None:
    (tmp_path / "hub").mkdir()
    folder = download(tmp_path / "hub")
    before = names().name(str(folder))
    changed = (folder / file).read_bytes() + b" "
    if not through_the_link:
        (folder / file).unlink()
    (folder / file).write_bytes(changed)
    with pytest.raises(ConfigError, match="changed after the engine's start"):
        content_before(folder, 0)
    assert names().name(str(folder)) != before


def test_two_adapters_of_one_commit_have_two_names(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    math = download(tmp_path / "hub", b"math", "math")
    code = download(tmp_path / "hub", b"code", "code")
    assert names().name(str(math)) != names().name(str(code))


def link_to(target: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def point_elsewhere(root: Path) -> None:
    link_to(root / "other", root / "latest")


def swap_folders(root: Path) -> None:
    (root / "first").rename(root / "away")
    (root / "other").rename(root / "first")


def point_files_elsewhere(root: Path) -> None:
    for file in (root / "linked").iterdir():
        link_to(root / "other" / file.name, file)


@pytest.mark.parametrize(
    ("path", "swap"),
    [
        ("latest", point_elsewhere),
        ("above/adapter", point_elsewhere),
        ("first", swap_folders),
        ("linked", point_files_elsewhere),
    ],
)
@pytest.mark.parametrize("named_before", [True, False])
def test_an_adapter_that_is_swapped_for_an_older_one_is_of_this_run_alone(
    tmp_path: Path, path: str, swap: Callable[[Path], None], named_before: bool
) -> None:
    """If a link is changed to point to an older adapter, the name is valid only in this run. All files of the new and
    the old adapter are older than the process, so file times do not show which adapter the engine has loaded.
    """
    for name, weights in (("first", b"one"), ("other", b"two")):
        write(tmp_path / name, weights)
    link_to(tmp_path / "first", tmp_path / "latest")
    (tmp_path / "above").symlink_to(".")
    (tmp_path / "adapter").symlink_to("latest")
    (tmp_path / "linked").mkdir()
    for file in (tmp_path / "first").iterdir():
        link_to(file, tmp_path / "linked" / file.name)
    asked = str(tmp_path / path)
    known = LoraNames()
    if named_before:
        assert known.name(asked).startswith("content:")
        assert not known.has_changed(asked)
    wait_for_clock(tmp_path, time.time_ns())
    swap(tmp_path)
    if named_before:
        assert known.has_changed(asked)
    else:
        assert known.name(asked).startswith("run:")


def test_a_path_that_changed_once_has_changed_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A path whose files changed once counts as changed in the rest of the run, because the engine may still use any
    earlier content of that path.
    """
    monkeypatch.setattr(logging.getLogger("flexkv"), "propagate", True)
    folder = write(tmp_path / "first")
    known = names()
    known.name(str(folder))
    stamp = lora_names.Stamp.of(folder)
    write(folder, b"two")
    assert known.has_changed(str(folder))
    monkeypatch.setattr(lora_names.Stamp, "of", lambda folder: stamp)
    assert known.has_changed(str(folder))
    [record] = caplog.records
    assert "nothing more is stored or loaded for it in this run" in record.getMessage()


def test_this_process_began_before_now_and_not_long_ago() -> None:
    age_s = (time.time_ns() - process_start_ns()) / 1e9
    assert 0 < age_s < 24 * 3600


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_kv_of_an_adapter_is_found_until_it_is_trained_anew(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, mode: str
) -> None:
    """KV of an adapter is found until the adapter is trained again. The adapter's name, number and path stay the same
    after that, and so do vLLM's own hashes.
    """
    engine = make_engine(blocks=12, **{"store.mode": mode, "store.max_reference_share": 1.0})
    folder = write(tmp_path / "adapter")
    adapter = lora("x", 1, str(folder))

    def ask(name: str, **fields: Any) -> int:
        tokens = engine.run(make_request(PROMPT, name, **fields))
        push_out(engine)
        return tokens

    assert ask("one", lora_request=adapter) == 0
    assert ask("two", lora_request=adapter) == HIT
    assert ask("without") == 0
    write(folder, b"two")
    assert ask("three", lora_request=adapter) == 0
    # flexkv cannot know when the engine loads the new content. So it stores nothing that is computed after the change.
    new = make_request([7, *PROMPT], "four", lora_request=adapter)
    assert engine.add(new) == 0
    keys = engine.side.requests.of(new).keys()[0]
    engine.step()
    engine.finish("four")
    push_out(engine)
    assert not engine.unit.manager.known(0, keys).any()
    in_place = LoRARequest(lora_name="x", lora_int_id=1, lora_path=str(folder), load_inplace=True)
    assert ask("five", lora_request=in_place) == 0
    assert ask("six", lora_request=in_place) == 0
    anew = lora("x", 2, str(shutil.copytree(folder, tmp_path / "anew")))
    assert ask("seven", lora_request=anew) == 0
    assert ask("eight", lora_request=anew) == HIT


def admitted(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, mode: str
) -> tuple[MiniEngine, Path, Keys]:
    """Admits request "one" with an adapter to an engine, which has not computed the request yet. Returns the engine,
    the adapter's folder, and the request's keys.
    """
    engine = make_engine(blocks=12, **{"store.mode": mode, "store.max_reference_share": 1.0})
    folder = write(tmp_path / "adapter")
    request = make_request(PROMPT, "one", lora_request=lora("x", 1, str(folder)))
    assert engine.add(request) == 0
    return engine, folder, engine.side.requests.of(request).keys()[0]


def stored(make_engine: Callable[..., MiniEngine], tmp_path: Path) -> tuple[MiniEngine, Path, LoRARequest]:
    """Returns an engine, an adapter's folder, and the adapter. The engine has stored PROMPT for the adapter and has
    then dropped its own prefix cache.
    """
    engine = make_engine(blocks=12)
    folder = write(tmp_path / "adapter")
    adapter = lora("x", 1, str(folder))
    assert engine.run(make_request(PROMPT, "one", lora_request=adapter)) == 0
    engine.forget()
    return engine, folder, adapter


@pytest.mark.parametrize("changed", [True, False], ids=["trained anew", "control"])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_kv_of_an_adapter_that_is_trained_anew_under_a_running_request_is_not_stored(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, mode: str, changed: bool
) -> None:
    """If an adapter changes while its request runs, the request's KV is not stored. The engine may load the adapter
    again in place, but the request's keys stand for the former content.
    """
    engine, folder, keys = admitted(make_engine, tmp_path, mode)
    if changed:
        write(folder, b"two")
    engine.step()
    engine.finish("one")
    push_out(engine)
    assert engine.unit.manager.known(0, keys).tolist() == [not changed] * len(keys)


@pytest.mark.parametrize("changed", [True, False], ids=["trained anew", "control"])
def test_a_request_that_waits_while_its_adapter_is_trained_anew_is_served_nothing(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, changed: bool
) -> None:
    engine, folder, adapter = stored(make_engine, tmp_path)
    waiting = make_request(PROMPT, "two", lora_request=adapter)
    engine.side.enter(waiting)
    if changed:
        write(folder, b"two")
    assert engine.run(waiting) == (0 if changed else HIT)


@pytest.mark.parametrize("changed", [True, False], ids=["trained anew", "control"])
@pytest.mark.parametrize("ends", [True, False], ids=["ends at once", "runs on"])
@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_kv_of_a_step_that_reads_an_adapter_as_it_changes_is_not_published(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, mode: str, ends: bool, changed: bool
) -> None:
    """If an adapter's files change while a step reads them, the step's KV is not published. The step's stores were
    planned under the name of the former content.
    """
    engine, folder, keys = admitted(make_engine, tmp_path, mode)
    tell = engine.hold_reports()
    engine.step(before_forward=partial(os.truncate, folder / "adapter_config.json", 0) if changed else None)
    if ends:
        # The engine ends the request before the connector gets the step's report.
        engine.finish("one")
    tell()
    if not ends:
        engine.finish("one")
    push_out(engine)
    assert engine.unit.manager.known(0, keys).tolist() == [not changed] * len(keys)


@pytest.mark.parametrize("changed", [True, False], ids=["trained anew", "control"])
def test_a_load_in_flight_for_an_adapter_that_is_trained_anew_fails(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, changed: bool
) -> None:
    """If an adapter changes while a load for it is in flight, the load fails. Otherwise the engine would compute the
    rest of the prompt with the new content, after KV of the former one.
    """
    engine, folder, adapter = stored(make_engine, tmp_path)
    assert engine.add(make_request(PROMPT, "two", lora_request=adapter)) == HIT
    if changed:
        write(folder, b"two")
        # When it takes this report, the scheduler's side notices the change before the load begins.
        engine.side.update(
            SimpleNamespace(invalid_block_ids=set(), kv_connector_worker_meta=WorkerMetadata([]))
        )
    engine.end_load("two")
    assert bool(engine.live["two"].request.num_computed_tokens) == (not changed)


def test_the_files_of_an_adapter_are_looked_at_once_per_step(
    make_engine: Callable[..., MiniEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(blocks=24)
    adapter = lora("x", 1, str(write(tmp_path / "adapter")))
    for name in ("one", "two", "three"):
        engine.add(make_request([ord(name[0]), *PROMPT], name, lora_request=adapter))
    looked: list[Path] = []
    stamp = lora_names.Stamp.of(tmp_path / "adapter")

    def look(folder: Path) -> lora_names.Stamp:
        looked.append(folder)
        return stamp

    monkeypatch.setattr(lora_names.Stamp, "of", look)
    engine.step()
    assert len(looked) == 1


def push_out(engine: MiniEngine) -> None:
    """Runs other requests that take all blocks of the engine, so that flexkv decides whether to store the blocks
    computed with the former content.
    """
    for number in range(4):
        tokens = [1000 + 50 * number + i for i in range(20)]
        engine.run(make_request(tokens, f"other-{number}-{time.monotonic_ns()}"))
    engine.forget()
