"""If a machine lacks something that a build needs, the error names it and the command that installs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from build_support import preflight, system_packages
from build_support.preflight import OPTIONAL_TEST_NEEDS, TEST_NEEDS, Need, OptionalNeed, advise, check

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.parametrize("known", [True, False])
def test_a_missing_optional_need_is_one_line_and_nothing_is_installed(
    known: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_packages, "may_install", lambda: True)
    monkeypatch.setattr(system_packages, "install", lambda needs: pytest.fail("installs"))
    monkeypatch.setattr(system_packages, "manager", lambda: system_packages.MANAGERS[0] if known else None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    advise(
        (
            OptionalNeed("sshfs", "it mounts", lambda: "there is no sshfs", "unit/test_mounts.py"),
            OptionalNeed("redis", "it stores", lambda: None, "unit/test_stores.py"),
        )
    )
    command = (
        "sudo apt-get install -y --no-install-recommends sshfs openssh-sftp-server"
        if known
        else "your package manager"
    )
    assert capsys.readouterr().out.splitlines() == [
        "flexkv: preflight: tests/unit/test_mounts.py (it mounts) is skipped: there is no sshfs; "
        f"install sshfs with: {command}"
    ]


def test_optional_needs_name_tests_that_exist() -> None:
    assert OPTIONAL_TEST_NEEDS
    assert all((ROOT / "tests" / need.skipped).is_file() for need in OPTIONAL_TEST_NEEDS)


@pytest.mark.parametrize("level", ["build", "test"])
def test_only_tests_have_optional_needs_and_go_on_without_them(
    level: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need = replace(OPTIONAL_TEST_NEEDS[0], missing=lambda: "a test takes it away")
    monkeypatch.setattr(preflight, "OPTIONAL_TEST_NEEDS", (need,))
    for required in ("BUILD_NEEDS", "TEST_NEEDS"):
        monkeypatch.setattr(preflight, required, ())
    monkeypatch.setattr("sys.argv", ["preflight", level])
    preflight.main()
    said = capsys.readouterr().out
    assert f"everything for `{level}` is there" in said
    assert ("a test takes it away" in said) == (level == "test")


def test_programs_that_mount_by_sftp_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "sftp-server"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight, "SFTP_SERVERS", (server,))
    assert preflight.no_sftp() == f"there is no sshfs on PATH and none of {server}"
    (tmp_path / "sshfs").symlink_to("/bin/true")
    assert preflight.no_sftp() == f"there is none of {server}"
    server.touch()
    assert preflight.no_sftp() is None


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


FAKE_SUDO = """#!/bin/sh
[ "$1" = -n ] && shift
[ {asks} = 1 ] && { echo 'sudo: a password is required' >&2; exit 1; }
exec "$@"
"""


@pytest.fixture
def fake_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates a machine on which apt-get only records its arguments."""
    for name in ("true", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    apt = tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> {tmp_path}/asked\n')
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FLEXKV_INSTALL_SYSTEM", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("uid", "sudo_asks", "declined", "allowed"),
    [
        (0, None, False, True),
        (0, None, True, False),
        (1000, None, False, False),
        (1000, True, False, False),
        (1000, False, False, True),
        (1000, False, True, False),
    ],
)
def test_packages_are_installed_as_root_or_where_sudo_does_not_ask(
    uid: int,
    sudo_asks: bool | None,
    declined: bool,
    allowed: bool,
    fake_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: uid)
    if sudo_asks is not None:
        (fake_machine / "sudo").write_text(FAKE_SUDO.replace("{asks}", str(int(sudo_asks))))
        (fake_machine / "sudo").chmod(0o755)
    if declined:
        monkeypatch.setenv("FLEXKV_INSTALL_SYSTEM", "0")
    assert system_packages.may_install() is allowed
    if not allowed:
        return
    assert system_packages.install(["doctest"])
    lines = (fake_machine / "asked").read_text().splitlines()
    assert lines == [
        "noninteractive update",
        "noninteractive install -y --no-install-recommends doctest-dev",
    ]
    assert "FLEXKV_INSTALL_SYSTEM=0 declines" in capsys.readouterr().out


def test_sudo_is_probed_once(fake_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    (fake_machine / "sudo").write_text(f'#!/bin/sh\necho "$*" >> {fake_machine}/sudone\nshift\nexec "$@"\n')
    (fake_machine / "sudo").chmod(0o755)
    assert system_packages.may_install()
    assert system_packages.install(["sanitizers", "c++"])
    as_root = "-n env DEBIAN_FRONTEND=noninteractive apt-get"
    assert (fake_machine / "sudone").read_text().splitlines() == [
        "-n true",
        f"{as_root} update",
        f"{as_root} install -y --no-install-recommends g++",
    ]


def test_a_person_is_shown_sudo_unless_root(fake_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "apt-get install -y --no-install-recommends doctest-dev"
    for uid, before in ((0, ""), (1000, "sudo ")):
        monkeypatch.setattr("os.geteuid", lambda uid=uid: uid)
        assert system_packages.install_command(["doctest"]) == before + shown


def test_a_third_word_for_installing_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEXKV_INSTALL_SYSTEM", "yes")
    with pytest.raises(SystemExit):
        system_packages.may_install()
    assert "FLEXKV_INSTALL_SYSTEM='yes'" in capsys.readouterr().err


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
