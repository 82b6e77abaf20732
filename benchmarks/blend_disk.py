"""`python -m benchmarks.blend_disk`: measures vLLM's time to the first token of blended prompts. The prompts' segments
are on disk, where an earlier process stored them, or in host memory, to which an earlier request loaded them. The times
are compared with those of prompts that are computed in full.

Each round has its own documents, which are only on disk when the round begins. Two engines take turns, one without
`disk.stream` and one with it, each with its own cache folder. Every round measures each method once, so that other work
on the machine affects all methods alike.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.arguments import at_least_one
from demo.blend import DOCUMENTS, MODEL_CLASS, QUESTION_TOKENS, SEPARATOR
from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess, engine_arguments
from demo.model import PRESETS, prompt_tokens, write_model

BLOCK_TOKENS = 32
ANSWER_TOKENS = 4
READ = "vllm:flexkv_blend_disk_pages_total", "direction=read"
BLENDED = "vllm:flexkv_blend_requests_total", "result=blended"
WAYS = ("full", "from disk", "from disk, streamed", "from host memory")
_salts = itertools.count()


class Prompts:
    """A round's documents, and the prompt that contains them."""

    def __init__(self, number: int, tokens: int, model: str) -> None:
        shape = PRESETS[model]
        first = 1000 + DOCUMENTS * number
        self.texts = [prompt_tokens(tokens, first + each, shape) for each in range(DOCUMENTS)]
        self.ids: list[int] = []
        self.segments: list[list[int]] = []
        for text in reversed(self.texts):
            self.ids.append(SEPARATOR)
            self.segments.append([len(self.ids), len(self.ids) + len(text)])
            self.ids += text
        self.ids += [SEPARATOR, *prompt_tokens(QUESTION_TOKENS, 900, shape)]

    def store(self, engine: EngineProcess) -> None:
        for text in self.texts:
            engine.generate([request(text, {"store": True}, 1)])

    def ask(self, engine: EngineProcess, ratio: float | None) -> tuple[float, float]:
        """Lets the engine answer the prompt. Returns the seconds to the first token, and the CPU seconds that the
        answer takes. `ratio` is the blending ratio; if it is None, the engine computes the prompt in full.
        """
        blend = None if ratio is None else {"segments": self.segments, "ratio": ratio}
        before = engine.call("processor_seconds")["seconds"]
        [answer] = engine.generate([request(self.ids, blend, ANSWER_TOKENS)])
        return answer["ttft_s"], engine.call("processor_seconds")["seconds"] - before


def request(ids: Sequence[int], blend: Any, answer_tokens: int) -> dict[str, Any]:
    return {
        "ids": list(ids),
        "max_tokens": answer_tokens,
        "salt": f"flexkv-blend:{os.getpid()}-{next(_salts)}",
        # Prompts that are computed in full are not stored, so that no write competes with the reads of the next prompt.
        "extra": {"kv_transfer_params": {"skip_save": True} if blend is None else {"flexkv.blend": blend}},
    }


def start(model: Path, folder: Path, stream: bool, tokens: int) -> EngineProcess:
    settings = {
        "host.bytes": 64 << 20,
        "blend.enabled": True,
        "blend.bytes": 512 << 20,
        "blend.disk_bytes": 2 << 30,
        "disk.folders": str(folder),
        "disk.bytes_per_folder": 64 << 20,
        "disk.wait_s": 30.0,
        "disk.stream": stream,
        "load.deadline_s": 120.0,
        "transfer.close_s": 60.0,
    }
    config = engine_arguments(
        model,
        FLEXKV | {"kv_connector_extra_config": settings},
        BLOCK_TOKENS,
        8 + 2 * (-(-tokens // BLOCK_TOKENS)),
    )
    config |= {
        "hf_overrides": {"architectures": [MODEL_CLASS]},
        "max_model_len": tokens,
        "max_num_batched_tokens": max(tokens, 2048),
    }
    log = folder.parent / f"engine-{folder.name}.log"
    return EngineProcess(config, log, environment=IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"})


def measure(
    engines: Sequence[EngineProcess], rounds: Sequence[Prompts], ratio: float
) -> dict[str, list[tuple[float, float]]]:
    """Runs all rounds. Returns each method's times, one entry per round, without the first round, which includes
    one-time setup.
    """
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number, prompts in enumerate(rounds):
        order = [0, 1] if number % 2 else [1, 0]
        full = prompts.ask(engines[0], None)
        cold = {which: prompts.ask(engines[which], ratio) for which in order}
        warm = prompts.ask(engines[order[0]], ratio)
        if number:
            for way, times in zip(WAYS, (full, cold[0], cold[1], warm), strict=True):
                found[way].append(times)
    return found


def count(engine: EngineProcess, metric: str, label: str) -> float:
    return sum(value for series, value in engine.metrics(metric).items() if label in series)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blend_disk", description=__doc__)
    parser.add_argument("--model", choices=sorted(PRESETS), default="medium")
    parser.add_argument("--document-tokens", type=int, default=384)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--folder", type=Path, default=Path("out"), help="where the segments lie meanwhile")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rounds = [
        Prompts(number, arguments.document_tokens, arguments.model) for number in range(arguments.rounds + 1)
    ]
    tokens = len(rounds[0].ids) + ANSWER_TOKENS
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work, ExitStack() as open_engines:
        model = write_model(arguments.folder / "models", arguments.model)
        folders = [Path(work) / name for name in ("waits", "streams")]
        for stream, folder in enumerate(folders):
            with start(model, folder, bool(stream), tokens) as engine:
                for prompts in rounds:
                    prompts.store(engine)
                engine.call("drain")
        engines = [
            open_engines.enter_context(start(model, folder, bool(stream), tokens))
            for stream, folder in enumerate(folders)
        ]
        before_load = os.getloadavg()[0]
        found = measure(engines, rounds, arguments.ratio)
        read = [count(engine, *READ) for engine in engines]
        blended = sum(count(engine, *BLENDED) for engine in engines)
    pages = len(rounds) * DOCUMENTS * -(-arguments.document_tokens // 16)
    print(f"prompts of {len(rounds[0].ids)} tokens, ratio {arguments.ratio:g}, {arguments.rounds} rounds")
    print(f"load average {before_load:.1f} before, {os.getloadavg()[0]:.1f} after")
    full_s, full_cpu_s = (statistics.median(times[at] for times in found["full"]) for at in (0, 1))
    for way, times in found.items():
        first, cpu = (statistics.median(each[at] for each in times) for at in (0, 1))
        print(
            f"{way:22} {1e3 * first:6.0f} ms to the first token, {first / full_s:.2f} of full; "
            f"{1e3 * cpu:6.0f} ms of processor time, {cpu / full_cpu_s:.2f} of full"
        )
    if read != [pages, pages] or blended != 3 * len(rounds):
        print(f"FAILED: {read} pages were read, {pages} lay on each disk; {blended:g} prompts were blended")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
