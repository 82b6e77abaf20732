"""`python -m demo.blend`: sends prompts that contain four documents in different orders to the real vLLM. Each document
was computed separately before. vLLM blends the prompts at several ratios, and computes them in full for comparison.

The time of an answer is the time from the request to the first token, including any wait for cached pages. The exit
code is 1 if the answers at ratio 1 differ from those of the full computation, or if a request was not blended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from demo.engine_process import FLEXKV, IN_PROCESS, EngineError, EngineProcess, engine_arguments
from demo.model import PRESETS, prompt_tokens, write_model

DOCUMENTS = 4
ORDERS = list(itertools.permutations(range(DOCUMENTS)))
QUESTION_TOKENS = 32
ANSWER_TOKENS = 8
BLOCK_TOKENS = 32
SEPARATOR = 5
RATIOS = (1.0, 0.5, 0.3, 0.15, 0.05, 0.0)
BLENDED = "vllm:flexkv_blend_requests_total"
MODEL_CLASS = "FlexKVLlamaForCausalLM"
CONNECTOR = FLEXKV | {
    "kv_connector_extra_config": {"host.bytes": 64 << 20, "blend.enabled": True, "blend.bytes": 256 << 20}
}


@dataclass
class Row:
    """The results of one method: a blending ratio, or the full computation.

    Attributes:
        name: "full" for the full computation; otherwise the ratio.
        seconds: seconds to the first token, one entry per prompt.
        processor_s: seconds of CPU time for a prompt and its answer, one entry per prompt. Other work on the machine
            hardly changes CPU times.
        same_tokens: share of the answers' tokens that are equal to those of the full computation.
        off: mean absolute difference between the first token's log probability and that of the full computation.
    """

    name: str
    seconds: list[float]
    processor_s: list[float]
    same_tokens: float
    off: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


class Documents:
    """The documents, and the prompts that contain them in a given order."""

    def __init__(self, tokens: int, model: str) -> None:
        shape = PRESETS[model]
        self.texts = [prompt_tokens(tokens, 100 + number, shape) for number in range(DOCUMENTS)]
        self._question = prompt_tokens(QUESTION_TOKENS, 900, shape)
        self._salts = itertools.count()

    def store(self, engine: EngineProcess) -> None:
        """Lets the engine compute each document separately and cache it."""
        for text in self.texts:
            engine.generate([self._request(text, {"store": True}, 1)])

    def ask(self, engine: EngineProcess, order: Sequence[int], ratio: float | None) -> dict[str, Any]:
        """Returns the answer to a prompt with the documents in the order `order`. `ratio` is the blending ratio; if it
        is None, the engine computes the prompt in full.
        """
        ids, segments = [], []
        for number in order:
            ids.append(SEPARATOR)
            segments.append([len(ids), len(ids) + len(self.texts[number])])
            ids += self.texts[number]
        ids += [SEPARATOR, *self._question]
        blend = None if ratio is None else {"segments": segments, "ratio": ratio}
        before = engine.call("processor_seconds")["seconds"]
        [answer] = engine.generate([self._request(ids, blend, ANSWER_TOKENS)])
        return answer | {"processor_s": engine.call("processor_seconds")["seconds"] - before}

    def _request(self, ids: list[int], blend: Any, answer_tokens: int) -> dict[str, Any]:
        return {
            "ids": ids,
            "max_tokens": answer_tokens,
            "logprobs": True,
            # Each request has its own salt, so that no prefix cache serves any prompt.
            "salt": f"flexkv-blend:{next(self._salts)}",
            "extra": None if blend is None else {"kv_transfer_params": {"flexkv.blend": blend}},
        }


def measure(engine: EngineProcess, documents: Documents, rounds: int) -> list[Row]:
    """Sends one prompt per method in each round. Successive rounds have the documents in different orders."""
    documents.store(engine)
    ways: list[float | None] = [None, *RATIOS]
    answers: dict[float | None, list[dict[str, Any]]] = {way: [] for way in ways}
    for way in ways:
        documents.ask(engine, ORDERS[-1], way)  # not counted: a first request includes one-time setup
    for number in range(rounds):
        for way in ways:
            answers[way].append(documents.ask(engine, ORDERS[number % len(ORDERS)], way))
    return [_row(way, answers[way], answers[None]) for way in ways]


def _row(way: float | None, answers: list[dict[str, Any]], full: list[dict[str, Any]]) -> Row:
    pairs = list(zip(answers, full, strict=True))
    same = [a == b for mine, theirs in pairs for a, b in zip(mine["tokens"], theirs["tokens"], strict=True)]
    off = [abs(mine["logprobs"][0] - theirs["logprobs"][0]) for mine, theirs in pairs]
    name = "full" if way is None else f"{way:g}"
    seconds, processor_s = ([each[of] for each in answers] for of in ("ttft_s", "processor_s"))
    return Row(name, seconds, processor_s, statistics.mean(same), statistics.mean(off))


def problems(rows: Sequence[Row], blended: float, rounds: int) -> list[str]:
    """Returns a text for each problem of the run. `blended` is the number of requests that flexkv counted as
    blended."""
    found = []
    exact = next(row for row in rows if row.name == "1")
    if exact.same_tokens < 1 or exact.off > 0:
        found.append("a ratio of 1 gave other answers than the full computation")
    if blended != len(RATIOS) * (rounds + 1):
        found.append(
            f"{blended:g} requests were blended, {len(RATIOS) * (rounds + 1)} asked for it; see the log"
        )
    return found


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="Four documents in another order, blended inside vLLM", box=SIMPLE_HEAD)
    for header in ("ratio", "TTFT ms", "of full", "CPU ms", "of full", "same tokens", "log p off"):
        shown.add_column(header, justify="right")
    for row in rows:
        shown.add_row(
            row.name,
            f"{1e3 * row.median_s:.0f}",
            f"{row.median_s / rows[0].median_s:.2f}",
            f"{1e3 * statistics.median(row.processor_s):.0f}",
            f"{statistics.median(row.processor_s) / statistics.median(rows[0].processor_s):.2f}",
            f"{row.same_tokens:.0%}",
            f"{row.off:.2g}",
        )
    return shown


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the times of all methods, and the error of the log probabilities for each ratio, and writes the picture to
    `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (times, off) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    names = [row.name for row in rows]
    times.bar(names, [1e3 * row.median_s for row in rows], color=["#888888"] + ["#2a7fb8"] * len(RATIOS))
    times.set(title="time to first token (ms)", xlabel="share of the reused rows computed again")
    off.bar(names[1:], [row.off for row in rows[1:]], color="#c2573a")
    off.set(title="first token's log probability: off by", xlabel="share of the reused rows computed again")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.blend", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results and models")
    parser.add_argument("--model", choices=sorted(PRESETS), default="medium", help="size of the random model")
    parser.add_argument("--document-tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the engine; demo.__main__ says why
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = write_model(arguments.out / "models", arguments.model)
    prompt = DOCUMENTS * (arguments.document_tokens + 1) + 1 + QUESTION_TOKENS
    longest = prompt + ANSWER_TOKENS
    engine_config = engine_arguments(model, CONNECTOR, BLOCK_TOKENS, 8 + 2 * (-(-longest // BLOCK_TOKENS)))
    engine_config |= {
        "hf_overrides": {"architectures": [MODEL_CLASS]},
        "max_model_len": longest,
        "max_num_batched_tokens": max(longest, 2048),
    }
    log = arguments.out / "demo-blend.log"
    rounds, kind = arguments.rounds, arguments.model
    console.print(f"prompts of {prompt} tokens, {rounds} of them for each ratio; a random {kind} Llama")
    try:
        environment = IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with EngineProcess(engine_config, log, environment=environment) as engine:
            rows = measure(engine, Documents(arguments.document_tokens, arguments.model), arguments.rounds)
            counted = engine.metrics(BLENDED)
    except EngineError as error:
        console.print(f"[red]The engine failed:[/] {error}", markup=True, highlight=False)
        return 1
    blended = sum(value for key, value in counted.items() if "result=blended" in key)
    found = problems(rows, blended, arguments.rounds)
    console.print(table(rows))
    draw(rows, arguments.out / "demo-blend.png")
    facts = {"prompt_tokens": prompt, "model": arguments.model, "problems": found}
    content = facts | {"rows": [asdict(row) for row in rows]}
    (arguments.out / "demo-blend.json").write_text(json.dumps(content, indent=1))
    console.print(
        f"wrote {arguments.out / 'demo-blend.png'}, {arguments.out / 'demo-blend.json'}; log {log}",
        soft_wrap=True,
    )
    for problem in found:
        console.print(f"[red]FAILED[/] {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
