"""Prompts with images in a real engine: the stored pages of such a prompt are served only for the same image."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess

from .conftest import OPERATIONS, PACKAGE, PACKAGE_ROOT, UNPINNED, connector, engine_arguments
from .session import BLOCK_TOKENS, EngineSession, Reference
from .test_disk import SLAB_BYTES, wait_durable
from .transformers_models import IMAGE_TOKENS, write_idefics_3

CAT, DOG = 1, 2
"""Seeds of two different images."""
BEFORE, AFTER = 70, 100
PROMPT = BEFORE + IMAGE_TOKENS + 3 + AFTER
WHOLE = (PROMPT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
TEXT_ALONE = BEFORE // BLOCK_TOKENS * BLOCK_TOKENS
TRUSTING = FLEXKV | {
    "kv_connector": "TrustingConnector",
    "kv_connector_module_path": f"{PACKAGE}.trusting_connector",
}
Start = Callable[..., EngineSession]


@pytest.fixture(scope="module")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idefics_3(tmp_path_factory.mktemp("images") / "model")


def engine_of(model: Path, log: Path, **engine: Any) -> EngineProcess:
    arguments = engine_arguments(model) | engine
    return EngineProcess(arguments, log, OPERATIONS, {**IN_PROCESS, **UNPINNED}, [PACKAGE_ROOT])


def ask(engine: EngineProcess, image: int, name: str = "") -> tuple[list[int], int]:
    """Asks about an image. Returns the answer, and how many of the prompt's tokens were not computed."""
    reply = engine.call("ask_image", seed=image, before=BEFORE, after=AFTER, name=name)
    assert reply["prompt"] == PROMPT
    return reply["tokens"], reply["cached"]


def answers_alone(model: Path, log: Path, **engine: Any) -> dict[int, list[int]]:
    """Sends prompts about each image to an engine without a connector and a prefix cache, and returns its answers."""
    with engine_of(model, log, enable_prefix_caching=False, **engine) as alone:
        return {image: ask(alone, image)[0] for image in (CAT, DOG)}


@pytest.fixture(scope="module")
def right(image_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[int]]:
    found = answers_alone(image_model, tmp_path_factory.mktemp("alone") / "engine.log")
    assert found[CAT] != found[DOG], "KV of another image would not be seen"
    return found


@pytest.fixture
def start(image_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines that use the same disk folder. Each start first closes the previous engine."""
    started: list[EngineProcess] = []

    def start_(
        kind: Mapping[str, Any] | None = None, model: Path | None = None, **engine: Any
    ) -> EngineSession:
        for process in started:
            process.close()
        kv = connector(
            kind,
            disk__folders=str(tmp_path / "disk"),
            disk__bytes_per_folder=SLAB_BYTES,
            disk__mode="through",
            disk__compute_if_faster=False,
        )
        log = tmp_path / f"engine-{len(started)}.log"
        started.append(engine_of(model or image_model, log, kv_transfer_config=kv, **engine))
        return EngineSession(started[-1], Reference(started[-1]))

    yield start_
    for process in started:
        process.close()


def test_an_image_is_served_its_own_kv_and_after_a_restart_too(
    start: Start, right: dict[int, list[int]]
) -> None:
    session = start()
    assert ask(session.process, CAT) == (right[CAT], 0)
    session.forget()
    assert ask(session.process, DOG) == (right[DOG], TEXT_ALONE)
    session.forget()
    assert ask(session.process, CAT) == (right[CAT], WHOLE)
    wait_durable(session)

    session = start()
    assert ask(session.process, DOG) == (right[DOG], WHOLE)
    session.forget()
    assert ask(session.process, CAT) == (right[CAT], WHOLE)


NAMES: list[tuple[str, dict[str, Any]]] = [
    ("", {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}),
    ("mine", {}),
]
"""For each case, the caller's name for an image, and the engine's arguments. With the arguments of the first case, vLLM
numbers images from 0 in each run, so different images get the same name.
"""


def first_images_of_two_runs(
    start: Start, kind: Mapping[str, Any] | None, name: str, engine: dict[str, Any]
) -> tuple[list[int], int]:
    """Runs two engines in turn. Each gives the same name to a different image. Returns the second engine's answer, and
    how many tokens it did not compute.
    """
    session = start(kind, **engine)
    ask(session.process, CAT, name)
    wait_durable(session)
    return ask(start(kind, **engine).process, DOG, name)


@pytest.mark.parametrize(("name", "engine"), NAMES, ids=["numbered", "by a client"])
def test_a_name_that_is_no_digest_serves_one_run(
    start: Start, right: dict[int, list[int]], name: str, engine: dict[str, Any]
) -> None:
    assert first_images_of_two_runs(start, None, name, engine) == (right[DOG], TEXT_ALONE)


@pytest.mark.parametrize(("name", "engine"), NAMES, ids=["numbered", "by a client"])
def test_control_a_name_taken_for_content_serves_another_image(
    start: Start, right: dict[int, list[int]], name: str, engine: dict[str, Any]
) -> None:
    assert first_images_of_two_runs(start, TRUSTING, name, engine) == (right[CAT], WHOLE)


def with_other_means(model: Path, folder: Path) -> Path:
    """Makes a copy of the model whose image processor subtracts different means from an image's pixels."""
    shutil.copytree(model, folder)
    file = folder / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.9, 0.5]
    file.write_text(json.dumps(settings))
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "engine",
    [
        {"hf_overrides": {"vision_config": {"layer_norm_eps": 1.0}}},
        {"mm_processor_kwargs": {"do_normalize": False}},
        {},
    ],
    ids=["vision part", "argument of the processor", "file of the processor"],
)
def test_what_makes_an_image_another_input_is_in_the_keys(
    start: Start, image_model: Path, right: dict[int, list[int]], tmp_path: Path, engine: dict[str, Any]
) -> None:
    session = start()
    assert ask(session.process, CAT) == (right[CAT], 0)
    wait_durable(session)
    model = image_model if engine else with_other_means(image_model, tmp_path / "other")
    other = answers_alone(model, tmp_path / "alone.log", **engine)
    assert other[CAT] != right[CAT], "KV of the other setting would not be seen"
    assert ask(start(model=model, **engine).process, CAT) == (other[CAT], 0)


@pytest.mark.long
def test_what_changes_no_input_is_in_no_key(start: Start, right: dict[int, list[int]]) -> None:
    session = start()
    assert ask(session.process, CAT) == (right[CAT], 0)
    wait_durable(session)
    engine = {"limit_mm_per_prompt": {"image": 2}, "mm_processor_cache_gb": 1, "skip_mm_profiling": True}
    session = start(**engine)
    assert ask(session.process, CAT) == (right[CAT], WHOLE)
    assert ask(session.process, DOG) == (right[DOG], TEXT_ALONE)
