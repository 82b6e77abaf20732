"""`python -m demo`: runs conversations through two real vLLM engines, one with flexkv and one without, and checks that
the two engines give the same answers. Then does the same with one prompt and a model with sliding windows.

The exit code is 0 if every answer equals that of the engine without flexkv, token for token, and flexkv served tokens
in every turn in which it should; otherwise 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo import hybrid, report
from demo.conversation import BLOCK_TOKENS, POOL_BLOCKS, Script, Turn, problems, turn_count
from demo.engine_process import FLEXKV, IN_PROCESS, EngineError, EngineProcess, engine_arguments
from demo.headline import headline, next_steps
from demo.model import PRESETS, write_model

TABLE_WIDTH = 80
"""Width of the result table in characters."""

HOST_BYTES = 512 << 20
DISK_BYTES = 512 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results and models")
    parser.add_argument("--model", choices=sorted(PRESETS), default="medium", help="size of the random model")
    parser.add_argument("--load-mode", choices=["async", "sync"], default="async")
    arguments = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, TABLE_WIDTH))  # a log need not fit a terminal's width
    started = time.monotonic()
    # The engines inherit this variable. On a machine with two cores that other programs use, too, two threads would
    # mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        turns, reference, facts = _run(arguments, console)
        windows = hybrid.play(arguments.out / "models", Path(facts["log"]), console.print)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except EngineError as error:
        console.print(f"[red]The engine failed:[/] {error}", markup=True, highlight=False)
        return 1
    console.print(report.table(turns, reference))
    console.print(report.LEGEND, highlight=False)
    found = [*problems(turns, reference), *windows.problems()]
    facts |= {"windows": asdict(windows), "problems": found, "seconds": time.monotonic() - started}
    report.write_json(arguments.out / "demo.json", facts, turns, reference)
    report.draw(turns, reference, arguments.out / "demo.png")
    console.print(f"{facts['model']}; {facts['prompt']}", highlight=False)
    # Paths are not wrapped, so that they can be copied.
    console.print(
        f"wrote {arguments.out / 'demo.png'}, {arguments.out / 'demo.json'}; log {facts['log']}",
        soft_wrap=True,
    )
    for problem in found:
        console.print(f"[red]FAILED[/] {problem}")
    if found:
        return 1
    served = sum(turn.served for turn in turns)
    console.print(f"[green]OK[/] flexkv served {served} prompt tokens; {facts['seconds']:.0f} s")
    console.print(str(windows), highlight=False, soft_wrap=True)
    for line in headline(turns, reference):
        console.print(f"[bold]{line}[/]", highlight=False, soft_wrap=True)
    console.print("what to try next:")
    for line in next_steps(arguments.out / "models" / f"{arguments.model}-0"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)  # unwrapped, for copying
    return 0


def _run(arguments: argparse.Namespace, console: Console) -> tuple[list[Turn], list[Turn], dict[str, Any]]:
    shape = PRESETS[arguments.model]
    log = arguments.out / "demo-vllm.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    flexkv = FLEXKV | {
        "kv_connector_extra_config": {
            "host.bytes": HOST_BYTES,
            "load.mode": arguments.load_mode,
            "disk.folders": str(_empty_folder(arguments.out / "disk")),
            "disk.bytes_per_folder": DISK_BYTES,
            # With the default, True, flexkv might never read from disk, because computing may be faster with such a
            # small model.
            "disk.compute_if_faster": False,
        }
    }
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    )
    with bar:
        task = bar.add_task(f"writing a random {arguments.model} Llama", total=turn_count() + 4)
        said: set[str] = set()

        def now(description: str, line: str | None = None) -> None:
            """Shows the step that begins. A log has no progress bar, so the function prints `line` (default:
            `description`) to a log, once.
            """
            bar.update(task, description=description, advance=1)
            line = line or description
            if not console.is_terminal and line not in said:
                said.add(line)
                console.print(line)

        model = write_model(arguments.out / "models", arguments.model)
        environment = IN_PROCESS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with ExitStack() as stack:
            engines = []
            for name, connector in (("with flexkv", flexkv), ("alone", None)):
                now(f"starting vLLM {name}")
                engine = EngineProcess(
                    engine_arguments(model, connector, BLOCK_TOKENS, POOL_BLOCKS),
                    log,
                    environment=environment,
                )
                engines.append(stack.enter_context(engine))

            def advance(turn: str) -> None:
                now(f"both engines: {turn}", f"both engines: {turn.split()[0]}")

            def restart() -> EngineProcess:
                now("starting vLLM with flexkv again")
                engines[0].close()
                again = EngineProcess(
                    engine_arguments(model, flexkv, BLOCK_TOKENS, POOL_BLOCKS), log, environment=environment
                )
                return stack.enter_context(again)

            script = Script(engines[0], engines[1], shape, advance, restart)
            script.play()
        bar.update(task, description="done", completed=turn_count() + 4)
    facts = {
        "model": f"random Llama {arguments.model}: {shape.layers} layers, hidden {shape.hidden}, float32, "
        f"{shape.kv_bytes_per_token} KV bytes a token",
        "prompt": f"random words; blocks of {BLOCK_TOKENS} tokens, engine pool of {POOL_BLOCKS - 1} blocks, "
        f"host tier of {HOST_BYTES >> 20} MiB, disk tier of {DISK_BYTES >> 20} MiB, {arguments.load_mode} loads, "
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}",
        "log": str(log),
        "kv_transfer_config": flexkv,
    }
    return script.turns, script.reference, facts


def _empty_folder(folder: Path) -> Path:
    """Makes the folder, and removes the pages of an earlier run from it, so that the first answers are computed.
    Returns the folder's absolute path.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder.resolve()


if __name__ == "__main__":
    sys.exit(main())
