"""Fixtures: a model, prompts, and the answers of an engine without flexkv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo.model import prompt_tokens, write_model
from demo.sglang_process import Launched, SglangProcess
from tests.engines_sglang.child import run_child
from tests.engines_sglang.forked import template

OUTPUT_TOKENS = 8

PROMPTS = {
    "a": prompt_tokens(200, 1),
    "b": prompt_tokens(333, 2),
    # The next two prompts share their first 240 tokens.
    "shared 1": prompt_tokens(240, 3) + prompt_tokens(60, 4),
    "shared 2": prompt_tokens(240, 3) + prompt_tokens(90, 5),
    "aborted": prompt_tokens(400, 6),
    "late": prompt_tokens(600, 7),
    **{f"filler {number}": prompt_tokens(700, 100 + number) for number in range(4)},
}
"""All prompts of these tests, by name. An engine without flexkv answers all of them and then ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # The usual limit is too short on a busy machine, where the starts of engines could take most of it.
            item.add_marker(pytest.mark.timeout(2400))


SPAWNED = ("test_linker",)
"""Test files whose first engine spawns its processes, as in deployment. All other engines are forked from a process
that has imported SGLang, and fork their own processes.
"""


def fork(
    process: SglangProcess,
    pipes: tuple[int, int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: int,
) -> Launched:
    """Replaces `SglangProcess.launched`, so that the template forks the process."""
    return template().start("demo.sglang_child", arguments, environment, output, output, pipes)


@contextmanager
def starting_by(method: str) -> Iterator[None]:
    """Within the `with` block, SGLang engines start their processes by the given start method of `multiprocessing`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SglangProcess, "start_method", method)
        if method == "fork":
            patch.setattr(SglangProcess, "launched", fork)
        yield


@pytest.fixture(scope="module", autouse=True)
def _start_method(request: pytest.FixtureRequest) -> Iterator[None]:
    with starting_by("spawn" if request.path.stem in SPAWNED else "fork"):
        yield


def request(name: str, **more: Any) -> dict[str, Any]:
    return {"ids": PROMPTS[name], "tokens": OUTPUT_TOKENS, **more}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"), "tiny")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the disk tier. All engines of a test file share it."""
    return tmp_path_factory.mktemp("disk")


Parts = dict[str, dict[str, dict[str, Any]]]
"""The results of each module of `parts_child.PARTS`: by module, then by case."""


@pytest.fixture(scope="session")
def parts() -> Parts:
    """The results of the modules that need SGLang's classes but no engine. All these modules run in one process."""
    found: Parts = {}
    for line in run_child("-m", "tests.engines_sglang.parts_child"):
        found.setdefault(line.pop("part"), {})[line.pop("case")] = line
    return found


Judge = Callable[[str, dict[str, Any]], None]
"""Compares the answer to the prompt of a given name with the answer of an engine without flexkv: all tokens and log
probabilities.
"""


def judge_of(expected: Mapping[str, dict[str, Any]]) -> Judge:
    """Makes a judge from the expected answers, a dict by the names of their prompts."""

    def judge_one(name: str, answer: dict[str, Any]) -> None:
        assert answer["finish"] == "length", answer
        said = f"of the answer to {name!r} are others: {answer}, not {expected[name]}"
        assert answer["tokens"] == expected[name]["tokens"], f"tokens {said}"
        close = pytest.approx(expected[name]["logprobs"], abs=LOGPROB_TOLERANCE)
        assert answer["logprobs"] == close, f"log probabilities {said}"

    return judge_one


def judge_by(
    model: Path,
    log: Path,
    names: Iterable[str],
    arguments: Mapping[str, Any] | None = None,
    **environment: str,
) -> Judge:
    """Runs an engine without flexkv and without a cache of its own. Makes a judge from its answers."""
    given = {"disable_radix_cache": True, **(arguments or {})}
    with starting_by("fork"), SglangProcess(model, log, given, **environment) as engine:
        return judge_of({name: engine.call("generate", requests=[request(name)])[0] for name in names})


@pytest.fixture(scope="session")
def judge(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return judge_by(model, tmp_path_factory.mktemp("reference") / "engine.log", PROMPTS)


LOGPROB_TOLERANCE = 1e-4
"""Largest allowed difference of a log probability in float32. Differences occur because a prefill of fewer rows may add
the same products in a different order.
"""
