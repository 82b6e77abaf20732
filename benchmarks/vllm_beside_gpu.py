"""Measures how loads and stores of other requests' KV affect the step times of a running request in the real vLLM.

Three engines run the same random Llama with CUDA graphs: without a connector, with flexkv, and with vLLM's
OffloadingConnector. In each engine, one request decodes all the time. Beside it, new prompts are computed first (and
stored, if there is a connector). Then prompts that the engine's own cache has evicted come again (and are loaded). Only
decoding steps, in which no prompt is computed, count. They are compared with the steps of the same window without
copies, and with the steps of the engine without a connector. Steps beside stores are compared with that engine's steps
beside the same prompts, and steps beside loads with its steps without other prompts.

    python -m benchmarks.vllm_beside_gpu [--json out/vllm_beside_gpu.json] [--check]

Each engine is one process, scheduler included. The engines start together and are measured one after the other.
`--prepare MODULE:FUNCTION` names a function that each engine calls before it imports vLLM. `--cpu` runs a tiny model on
a CPU, which shows that the program works, but says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.step_times import (
    Copy,
    Spread,
    Step,
    Verdict,
    beside,
    longest,
    more_than,
    quiet,
    ratio,
    spread,
)

BASE, FLEXKV, OFFLOADING = "no connector", "flexkv", "OffloadingConnector"
NAMES = (BASE, FLEXKV, OFFLOADING)
GIB = 1 << 30
STORE_RATIO_MAX, LOAD_RATIO_MAX, KERNEL_RATIO_MAX = 1.05, 1.10, 1.15
P99_MORE_MS_MAX = 2.0
START_S, ANSWER_S, CLOSE_S = 150.0, 60.0, 20.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the model, of the engine's pool and of the prompts.

    Attributes:
        prompt_tokens: number of tokens of each prompt that runs at the same time as the running request.
        loaded_prompts: number of prompts that are run again and again, in turn. All of them together are larger than
            the engine's pool.
        least_steps: minimum number of decoding steps during copies for a conclusive result.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    context: int
    prompt_tokens: int
    loaded_prompts: int
    pool_tokens: int
    host_bytes: int
    least_steps: int
    batch_tokens: int
    block_tokens: int

    def token_bytes(self, number_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head * number_bytes


GPU_SIZE = Size(32, 2048, 16, 8, 128, 3072, 32000, 40960, 8192, 8, 57344, 12 * GIB, 500, 8192, 16)
"""A Llama with 1.1 billion weights and as much KV as a larger model: 128 KiB per token, 1 GiB per prompt."""
CPU_SIZE = Size(2, 128, 2, 1, 64, 256, 1024, 6144, 512, 20, 8192, 1 << 26, 12, 512, 32)


def model_folder(folder: Path, size: Size, dtype: str) -> Path:
    """Writes the model's configuration. The engine makes random weights itself (`load_format` dummy)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head,
        "max_position_embeddings": size.context,
        "vocab_size": size.vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": dtype,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def connector(name: str, size: Size, cpu: bool) -> dict[str, Any] | None:
    """Returns vLLM's kv_transfer_config for the connector `name`; None if there is none."""
    if name == FLEXKV:
        return {
            "kv_connector": "FlexKVConnector",
            "kv_connector_module_path": "flexkv.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host.bytes": size.host_bytes, "identity.model": "beside"},
        }
    if name == OFFLOADING:
        extra: dict[str, Any] = {"cpu_bytes_to_use": size.host_bytes}
        if cpu:
            extra |= {"spec_name": "HostCopySpec", "spec_module_path": "benchmarks.cpu_offload_spec"}
        return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return None


def engine_arguments(name: str, size: Size, model: Path, cpu: bool) -> dict[str, Any]:
    """Returns the keyword arguments of `vllm.LLM` for the engine `name`."""
    dtype = "float32" if cpu else "bfloat16"
    arguments: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": size.context,
        "max_num_batched_tokens": size.batch_tokens,
        "max_num_seqs": 8,
        "block_size": size.block_tokens,
        "disable_log_stats": False,
        "seed": 0,
        "enforce_eager": cpu,
    }
    if cpu:
        # The share of memory must be large enough for vLLM to start; the override sets the pool's real size.
        arguments["gpu_memory_utilization"] = 0.2
        arguments["num_gpu_blocks_override"] = size.pool_tokens // size.block_tokens
    else:
        arguments |= {
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": size.pool_tokens * size.token_bytes(2),
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4],
            },
        }
    chosen = connector(name, size, cpu)
    return arguments if chosen is None else arguments | {"kv_transfer_config": chosen}


class EngineError(RuntimeError):
    """Raised if an engine failed a command, died or did not answer in time. The message shows the end of the engine's
    log.
    """


class EngineProcess:
    """A child process with one engine, as a context manager.

    Args:
        log: the file to which the engine's output goes.
    """

    def __init__(self, name: str, log: Path, environment: Mapping[str, str]) -> None:
        self.name, self._log = name, log
        read, write = os.pipe()
        command = [sys.executable, "-m", "benchmarks.vllm_beside_engine", str(write)]
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                env={**ENVIRONMENT, **os.environ, **environment},
                cwd=Path(__file__).resolve().parents[1],
            )
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._rest = b""

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.poll() is None:
            try:
                self.call("close", CLOSE_S)
            except EngineError as error:
                print(f"{self.name} was ended by force: {str(error).splitlines()[0]}", file=sys.stderr)
            try:
                self._child.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._answers.close()

    def send(self, what: str, **arguments: Any) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write((json.dumps({"op": what, "arguments": arguments}) + "\n").encode())
            self._child.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"{self.name}: the engine has died\n{self._tail()}") from None

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Returns the engine's next answer. Raises EngineError if the command failed or took over `limit_s` seconds."""
        ends_s = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                self._child.kill()
                raise EngineError(f"{self.name}: no answer in {limit_s:.0f} s\n{self._tail()}")
            if not (read := self._answers.read(1 << 20)):
                raise EngineError(f"{self.name}: the engine has died\n{self._tail()}")
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise EngineError(f"{self.name}: {answer['error']}\n{answer['trace']}\n{self._tail()}")
        return answer

    def call(self, what: str, answer_s: float, **arguments: Any) -> dict[str, Any]:
        self.send(what, **arguments)
        return self.answer(answer_s)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def measure(engine: EngineProcess, size: Size, window_s: float) -> dict[str, Any]:
    """Measures a running request in three windows: alone, while other prompts are computed, and while evicted prompts
    come again.

    Args:
        window_s: approximate seconds for all of these windows together.
    """
    ends_s = time.monotonic() + window_s
    limit_s = ANSWER_S + window_s
    engine.call("begin", limit_s)
    # These prompts are not measured: they compile kernels and touch memory for the first time.
    engine.call(
        "prompts", limit_s, length=size.prompt_tokens, streams=[2, 3], least_steps=0, window_s=window_s
    )
    found = {"alone": engine.call("alone", limit_s, steps=size.least_steps)}
    # Each copy is in flight for only a few steps, so the engine gets new prompts until the time is over.
    share_s = (ends_s - time.monotonic()) / 2.2
    fresh = list(range(100, 100 + 10 * size.least_steps))
    found["computed"] = engine.call(
        "prompts",
        limit_s,
        length=size.prompt_tokens,
        streams=fresh,
        least_steps=size.least_steps,
        window_s=share_s,
    )
    kept = list(range(10, 10 + size.loaded_prompts))
    engine.call("prompts", limit_s, length=size.prompt_tokens, streams=kept, least_steps=0, window_s=window_s)
    found["again"] = engine.call(
        "prompts",
        limit_s,
        length=size.prompt_tokens,
        streams=kept * (10 * size.least_steps),
        least_steps=size.least_steps,
        window_s=max(1.0, ends_s - time.monotonic()),
    )
    engine.call("end", limit_s)
    return found


def steps_of(window: Mapping[str, Any]) -> list[Step]:
    return [Step(**step) for step in window["steps"]]


def copies_of(window: Mapping[str, Any]) -> list[Copy]:
    return [Copy(**copy) for copy in window["copies"]]


def summary(windows: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the percentiles and the longest steps of one engine's windows."""
    alone = steps_of(windows["alone"])
    found: dict[str, Any] = {"alone": asdict(spread(alone))}
    found["alone, longest"] = longest(alone, copies_of(windows["alone"]))
    for name in ("computed", "again"):
        window = windows[name]
        steps, copies = steps_of(window), copies_of(window)
        decoding = [step for step in steps if step.decodes]
        found[name] = {
            "prompts": window["prompts"],
            "cached tokens": window["cached"],
            "TTFT, ms": [round(taken, 2) for taken in window["ttft_ms"]],
            "all steps": asdict(spread(steps)),
            "decoding steps": asdict(spread(decoding)),
            "quiet steps": asdict(spread(quiet(steps, copies))),
            "decoding steps beside stores": asdict(spread(beside(decoding, copies, "store"))),
            "decoding steps beside loads": asdict(spread(beside(decoding, copies, "load"))),
            "longest decoding steps": longest(decoding, copies),
            "longest steps": longest(steps, copies),
            "bytes by path": window["path_bytes"],
        }
    return found


def verdicts(summaries: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Compares the steps beside flexkv's copies with the steps of the same engine without copies, and with those of the
    engine without a connector."""
    if FLEXKV not in summaries:
        return []
    mine = summaries[FLEXKV]
    found = []
    by_kernel = _mostly_kernel(mine["again"]["bytes by path"])
    for window, kind, limit in (
        ("computed", "stores", STORE_RATIO_MAX),
        ("again", "loads", LOAD_RATIO_MAX),
    ):
        limit = KERNEL_RATIO_MAX if by_kernel else limit
        beside_it = mine[window][f"decoding steps beside {kind}"]
        # The steps for comparison are from the same window, so that clocks, temperature and request length are the
        # same.
        alone = mine[window]["quiet steps"]
        found += [
            Verdict(f"beside {kind}: p50 / alone", ratio(beside_it["p50_ms"], alone["p50_ms"]), limit),
            Verdict(
                f"beside {kind}: p99 more than alone, ms",
                more_than(beside_it["p99_ms"], alone["p99_ms"]),
                P99_MORE_MS_MAX,
            ),
        ]
        if BASE in summaries:
            base = summaries[BASE]
            other = base["computed"]["decoding steps"] if kind == "stores" else base["alone"]
            words = "beside the same prompts" if kind == "stores" else "alone"
            what = f"beside {kind}, of no connector {words}"
            found += [
                Verdict(f"{what}: p50", ratio(beside_it["p50_ms"], other["p50_ms"]), limit),
                Verdict(
                    f"{what}: p99 more, ms", more_than(beside_it["p99_ms"], other["p99_ms"]), P99_MORE_MS_MAX
                ),
            ]
    return found


def _mostly_kernel(moved: Mapping[str, int]) -> bool:
    return bool(moved) and max(moved, key=lambda path: moved[path]) == "kernel"


def failures(summaries: Mapping[str, Mapping[str, Any]], least_steps: int) -> list[str]:
    """Returns why the measurement is inconclusive; empty if it is conclusive."""
    found = []
    for name, mine in summaries.items():
        if name == BASE:
            continue
        if not any(mine["again"]["cached tokens"]):
            found.append(f"{name}: no prompt that came again was served")
        if name == FLEXKV:
            for window, kind in (("computed", "stores"), ("again", "loads")):
                steps = mine[window][f"decoding steps beside {kind}"]["steps"]
                if steps < least_steps:
                    found.append(
                        f"{name}: {steps} decoding steps beside {kind}, {least_steps} were wanted: raise --seconds"
                    )
    return found


def show(summaries: Mapping[str, Mapping[str, Any]], found: list[Verdict], console: Console) -> None:
    table = Table(title="time of a running request's step, ms")
    for heading in ("engine", "beside", "steps", "p50", "p90", "p99", "max", "connector, p50"):
        table.add_column(heading, justify="left" if heading in ("engine", "beside") else "right")

    def row(name: str, label: str, taken: Mapping[str, Any]) -> None:
        numbers = Spread(**taken)
        cells = [
            "-" if value is None else f"{value:.3f}"
            for value in (
                numbers.p50_ms,
                numbers.p90_ms,
                numbers.p99_ms,
                numbers.max_ms,
                numbers.connector_p50_ms,
            )
        ]
        table.add_row(name, label, str(numbers.steps), *cells)

    for name, mine in summaries.items():
        row(name, "alone", mine["alone"])
        for window, label in (("computed", "prompts computed"), ("again", "prompts again")):
            row(name, f"{label}: all steps", mine[window]["all steps"])
            row(name, f"{label}: decoding steps", mine[window]["decoding steps"])
            row(name, f"{label}: alone", mine[window]["quiet steps"])
            for kind in ("stores", "loads"):
                taken = mine[window][f"decoding steps beside {kind}"]
                if taken["steps"]:
                    row(name, f"{label}: decoding, beside {kind}", taken)
    console.print(table)
    for name, mine in summaries.items():
        for window in ("computed", "again"):
            console.print(f"{name}, {window}: longest decoding steps", highlight=False)
            for step in mine[window]["longest decoding steps"]:
                console.print(f"  {step['ms']:9.3f} ms: {step['cause']}", highlight=False)
    for verdict in found:
        value = "not measured" if verdict.value is None else f"{verdict.value:.3f}"
        colour = "green" if verdict.met else "red"
        console.print(f"[{colour}]{verdict.what}: {value} (reach <= {verdict.limit:g})[/]", highlight=False)


def run(arguments: argparse.Namespace, size: Size, folder: Path) -> dict[str, dict[str, Any]]:
    """Runs all engines, and returns their summaries. An engine that fails is left out, and its error is printed."""
    model = model_folder(folder / "model", size, "float32" if arguments.cpu else "bfloat16")
    environment = {"OMP_NUM_THREADS": "1"} if arguments.cpu else {}
    found: dict[str, dict[str, Any]] = {}
    engines: dict[str, EngineProcess] = {}
    names = arguments.only or NAMES

    def start(name: str) -> None:
        log = arguments.json.with_name(f"{arguments.json.stem}-{name.replace(' ', '-')}.log")
        engines[name] = EngineProcess(name, log, environment)
        engines[name].send(
            "start",
            prepare=arguments.prepare,
            arguments=engine_arguments(name, size, model, arguments.cpu),
            vocabulary=size.vocabulary,
            flexkv=name == FLEXKV,
        )

    try:
        if not arguments.cpu:
            for name in names:  # all at once, so that imports and graph captures overlap
                start(name)
        ready = []
        for name in names:
            if name not in engines:
                start(name)
            try:
                started = engines[name].answer(START_S)
                print(f"{name}: started in {started['seconds']:.1f} s", flush=True)
                ready.append(name)
            except EngineError as error:
                print(error, file=sys.stderr, flush=True)
        for name in ready:
            try:
                began_s = time.monotonic()
                windows = measure(engines[name], size, arguments.seconds)
                if arguments.steps:
                    every = arguments.json.with_name(
                        f"{arguments.json.stem}-{name.replace(' ', '-')}-steps.json"
                    )
                    every.write_text(json.dumps(windows))
                found[name] = summary(windows)
                print(f"{name}: measured in {time.monotonic() - began_s:.1f} s", flush=True)
                write(arguments.json, arguments, size, found)
            except EngineError as error:
                print(error, file=sys.stderr, flush=True)
    finally:
        for engine in engines.values():
            engine.__exit__()
    return found


def write(path: Path, arguments: argparse.Namespace, size: Size, summaries: Mapping[str, Any]) -> None:
    found = verdicts(summaries)
    content = {
        "cpu": arguments.cpu,
        "size": asdict(size),
        "engines": summaries,
        "verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in found],
        "void": failures(summaries, size.least_steps),
    }
    path.write_text(json.dumps(content, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("out/vllm_beside_gpu.json"))
    parser.add_argument("--seconds", type=float, default=25.0, help="for one engine's windows, about")
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--prepare", default="", help="MODULE:FUNCTION, called before vLLM is imported")
    parser.add_argument("--kv-heads", type=int, help="KV heads of the model: 1 gives runs of 4 KiB")
    parser.add_argument(
        "--steps", action="store_true", help="keep every step and copy, in files beside the result"
    )
    parser.add_argument("--cpu", action="store_true", help="a tiny model on a CPU: tries the program alone")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is missed")
    arguments = parser.parse_args()
    arguments.json = arguments.json.absolute()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    size = CPU_SIZE if arguments.cpu else GPU_SIZE
    if arguments.kv_heads:
        size = Size(**{**asdict(size), "kv_heads": arguments.kv_heads})
    with tempfile.TemporaryDirectory(prefix="vllm-beside-") as folder:
        summaries = run(arguments, size, Path(folder))
    write(arguments.json, arguments, size, summaries)
    found = verdicts(summaries)
    show(summaries, found, Console(width=160))
    void = failures(summaries, size.least_steps)
    void += [f"{name}: no result" for name in arguments.only or NAMES if name not in summaries]
    for reason in void:
        print(reason, file=sys.stderr)
    return int(bool(void) or (arguments.check and not all(verdict.met for verdict in found)))


if __name__ == "__main__":
    sys.exit(main())
