"""Follows one block through flexkv's Python code: counts the files that it visits and the calls that it takes.

A real vLLM in one process stores one block and loads it again. The program counts every call into flexkv on the
engine's thread. The counts show how many files a newcomer must read to follow a block, and how often they must switch
between files. Waiting adds calls, so the run with the fewest calls is reported.

    python -m benchmarks.block_walk [--runs 7] [--mode async] [--json out/block_walk.json] [--list]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

import flexkv
from benchmarks.arguments import at_least_one
from benchmarks.vllm_ttft import BLOCK_TOKENS
from demo.engine_process import FLEXKV, IN_PROCESS, EngineProcess
from demo.model import PRESETS, prompt_tokens, write_model

MODEL = "tiny"
HOST_BYTES = 64 << 20
PACKAGE = Path(flexkv.__file__).resolve().parent
STORE, LOAD = "store", "load"


@dataclass
class Walk:
    """Calls into flexkv during a span of time.

    Attributes:
        by_file: number of calls of each file's functions; the key is the file's path in the package.
        changes: number of calls of a function that is in a different file than the function called before it.
        hooks: number of calls into flexkv that come from code outside flexkv, such as the engine's calls of hooks.
        functions: number of calls of each function; the key is "file:name".
    """

    by_file: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    changes: int = 0
    hooks: int = 0
    _last: str = ""

    @property
    def calls(self) -> int:
        return sum(self.by_file.values())

    def profile(self, frame: FrameType, event: str, _argument: object) -> None:
        """Counts one call. `sys.setprofile` installs this function."""
        code = frame.f_code
        # Comprehensions and lambdas are not counted: for a reader they are not separate steps, and newer versions of
        # Python make no frame for a comprehension.
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(str(PACKAGE)):
            return
        file = code.co_filename[len(str(PACKAGE)) + 1 :]
        self.by_file[file] += 1
        self.functions[f"{file}:{code.co_name}"] += 1
        caller = frame.f_back
        self.hooks += caller is None or not caller.f_code.co_filename.startswith(str(PACKAGE))
        self.changes += file != self._last
        self._last = file


def walk(llm: Any, ids: list[int]) -> dict[str, Any]:
    """Runs one request, waits until its stores have finished, and returns the counts. Called in the engine's process
    (see `EngineProcess`).
    """
    from demo.engine_child import drain, generate

    seen = Walk()
    sys.setprofile(seen.profile)
    try:
        [request] = generate(llm, [{"ids": ids, "max_tokens": 1}])["requests"]
        drain(llm)
    finally:
        sys.setprofile(None)
    facts = {"files": len(seen.by_file), "calls": seen.calls, "hooks": seen.hooks, "changes": seen.changes}
    return {"cached": request["cached"] or 0, "walk": facts | {"functions": dict(seen.functions)}}


OPERATIONS = {"walk": walk}


def measure(engine: EngineProcess, runs: int) -> dict[str, dict[str, Any]]:
    """Returns, for a store and for a load, the counts of the run with the fewest calls.

    Raises:
        RuntimeError: the request that stores a block found tokens in a cache, or the request that loads a block did not
            find exactly one.
    """
    least: dict[str, dict[str, Any]] = {}
    for number in range(runs + 1):
        # The prompt is one complete block and one more token, because an engine always computes a prompt's last token
        # itself.
        ids = prompt_tokens(BLOCK_TOKENS + 1, number, PRESETS[MODEL])
        for name, cached in ((STORE, 0), (LOAD, BLOCK_TOKENS)):
            answer = engine.call("walk", ids=ids)
            if answer["cached"] != cached:
                raise RuntimeError(f"{name}: {answer['cached']} tokens came from a cache, not {cached}")
            engine.call("reset")
            found = answer["walk"]
            # The first run is not counted, because it imports modules and makes objects that later runs reuse.
            if number and (name not in least or found["calls"] < least[name]["calls"]):
                least[name] = found
    return least


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=at_least_one, default=7)
    parser.add_argument("--mode", choices=("sync", "async"), default="async")
    parser.add_argument("--list", action="store_true", help="print every function with its calls")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--json", type=Path, default=Path("out/block_walk.json"))
    arguments = parser.parse_args()
    console = Console()
    extra = {"host.bytes": HOST_BYTES, "load.mode": arguments.mode}
    engine_arguments = {
        "model": str(write_model(arguments.out / "models", MODEL)),
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 64,
        "kv_transfer_config": FLEXKV | {"kv_connector_extra_config": extra},
    }
    log = arguments.out / "block_walk.log"
    with EngineProcess(engine_arguments, log, ("benchmarks.block_walk",), IN_PROCESS) as engine:
        walks = measure(engine, arguments.runs)
    table = Table(title=f"one block through vLLM's adapter, load.mode {arguments.mode}, one process, CPU")
    for column in ("", "files", "calls", "by the engine", "changes of file"):
        table.add_column(column, justify="right" if column else "left")
    for name, found in walks.items():
        table.add_row(name, *(str(found[key]) for key in ("files", "calls", "hooks", "changes")))
    console.print(table)
    if arguments.list:
        for name, found in walks.items():
            console.print(f"[bold]{name}[/]")
            for function, calls in sorted(found["functions"].items()):
                console.print(f"{calls:5} {function}", highlight=False)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(walks, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
