"""What is missing on a machine is named, with the command that installs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_support import preflight, system_packages
from build_support.preflight import TEST_NEEDS, Need, check


def test_this_machine_can_run_the_tests() -> None:
    check(TEST_NEEDS)


def test_missing_things_are_named_with_reason_and_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_packages, "may_install", lambda: False)
    monkeypatch.setattr(system_packages, "manager", lambda: system_packages.MANAGERS[0])
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    needs = (
        Need("doctest", "the native tests use it", lambda: "no header"),
        Need("sanitizers", "the tests run under them", lambda: "no libasan"),
        Need("c++", "it builds", lambda: None),
    )
    with pytest.raises(SystemExit):
        check(needs)
    said = capsys.readouterr().err
    assert "doctest: the native tests use it, but no header" in said
    assert "no libasan" in said
    assert "it builds" not in said
    assert "sudo apt-get install -y --no-install-recommends doctest-dev g++" in said


def test_an_unknown_distribution_is_told_without_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_packages, "may_install", lambda: False)
    monkeypatch.setattr(system_packages, "manager", lambda: None)
    with pytest.raises(SystemExit):
        check((Need("c++", "it builds", lambda: "none"),))
    assert "package manager" in capsys.readouterr().err


def test_what_can_be_installed_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []
    monkeypatch.setattr(system_packages, "may_install", lambda: True)

    def install(needs: list[str]) -> bool:
        there.extend(needs)
        return True

    monkeypatch.setattr(system_packages, "install", install)
    check((Need("doctest", "tests", lambda: None if there else "no header"),))
    assert there == ["doctest"]


@pytest.mark.parametrize(
    ("environ", "uid", "allowed"),
    [
        ({"CI": "true"}, 0, True),
        ({"FLEXKV_INSTALL_SYSTEM": "1"}, 0, True),
        ({}, 0, False),
        ({"CI": "true"}, 1000, False),
        ({"CI": "false"}, 0, False),
    ],
)
def test_nothing_is_installed_unasked(
    environ: dict[str, str], uid: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "FLEXKV_INSTALL_SYSTEM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert system_packages.may_install() is allowed


def test_an_old_compiler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old++"
    old.write_text("#!/bin/sh\necho \"error: unrecognized option '-std=c++20'\" >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    assert "unrecognized option" in (preflight.BUILD_NEEDS[0].missing() or "")
    monkeypatch.setenv("CXX", str(tmp_path / "none++"))
    assert "does not run" in (preflight.BUILD_NEEDS[0].missing() or "")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no g++" in (preflight.BUILD_NEEDS[0].missing() or "")


def test_python_that_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(preflight, "OLDEST_PYTHON", (99, 0))
    with pytest.raises(SystemExit):
        check(())
    assert "99.0 or newer" in capsys.readouterr().err
