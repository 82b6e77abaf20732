"""Checks the files in deploy/ statically. No test starts a service with systemd, or a container."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers.mooncake import binary

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PAGE = (ROOT / "docs" / "remote.md").read_text()


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def unit_settings(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def commands() -> dict[str, list[str]]:
    """Returns the command line of every server in deploy/, by the name of the server's unit file or compose service."""
    found = {path.name: shlex.split(unit_settings(path)["Service"]["ExecStart"]) for path in UNITS}
    return found | {name: service["command"] for name, service in compose()["services"].items()}


def test_every_file_is_named_on_its_page() -> None:
    for path in DEPLOY.iterdir():
        assert path.suffix == ".acl" or f"deploy/{path.name}" in PAGE, path.name
    assert "only checked statically" in PAGE


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_whole(path: Path) -> None:
    unit = unit_settings(path)
    assert {*unit.sections()} == {"Unit", "Service", "Install"}
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert service["DynamicUser"] == "yes"
    named = set(re.findall(r"\$\{(\w+)\}", service["ExecStart"]))
    head = path.read_text().partition("[Unit]")[0]
    assert named, "nothing to set"
    assert all(f"{name}=" in head for name in named), (
        "what to put into the environment file is told at its head"
    )
    assert service["EnvironmentFile"] in head


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_units(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH: the unit files are parsed, not verified")
    # systemd-analyze checks that the program exists. The server is not installed on this machine, so the copy runs
    # /bin/true.
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", path.read_text()))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if path.name in line]
    assert (done.returncode, said) == (0, [])


def test_control_systemd_names_what_it_does_not_know(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on PATH: the unit files are parsed, not verified")
    copy = tmp_path / "wrong.service"
    copy.write_text("[Service]\nExecStart=/bin/true\nRestartSecs=2\n")
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert "RestartSecs" in done.stderr


def test_compose_names_images_commands_and_ports() -> None:
    services = compose()["services"]
    assert set(services) == {"master", "owner-0", "owner-1", "redis"}
    for name, service in services.items():
        assert service["image"], name
        assert service["command"], name
        assert service["restart"] == "unless-stopped"
        assert service.get("network_mode") == "host" or service["ports"], name
    assert [name for name in services if "profiles" in services[name]] == ["redis"]
    assert all(port.startswith("127.0.0.1:") for port in services["redis"]["ports"])
    wheel = re.search(r"mooncake\S+==\S+", (ROOT / "requirements" / "mooncake.txt").read_text())
    assert wheel is not None
    assert wheel[0] in services["master"]["build"]["dockerfile_inline"]


def test_owners_of_one_machine_have_ports_of_their_own() -> None:
    found = [
        word
        for name, command in commands().items()
        if name.startswith("owner-")
        for word in command
        if word.startswith("--port=")
    ]
    assert len(found) == len(set(found)) == 2


@pytest.mark.parametrize("name", sorted(commands()))
def test_mooncake_knows_every_flag(name: str) -> None:
    program, *words = commands()[name]
    if "mooncake" not in program:
        pytest.skip("no program of Mooncake's")
    shown = subprocess.run([binary(Path(program).name), "--help"], capture_output=True, text=True)
    known = set(re.findall(r"^\s+-(\w+) \(", shown.stdout + shown.stderr, re.M))
    used = {word.lstrip("-").partition("=")[0] for word in words}
    assert used <= known


def test_no_secret_is_written_down() -> None:
    for path in DEPLOY.iterdir():
        if path.suffix == ".acl":
            continue
        for line in path.read_text().splitlines():
            said = line.partition("#")[2] if "#" in line else line
            assert not re.search(r"(?i)(--requirepass|password\s*[:=]\s*\S|on >(?!PASSWORD))", line), line
            assert "://" not in said or "@" not in said
    for service in compose()["services"].values():
        assert not [
            name for name in service.get("environment", {}) if re.search("(?i)pass|secret|token", name)
        ]


def test_the_page_starts_what_the_files_start() -> None:
    """The commands that the page shows have the same flags as the commands in the files of deploy/."""
    for program, file in (("mooncake_master", "mooncake-master"), ("mooncake_client", "mooncake-owner")):
        flags = {word.partition("=")[0] for word in commands()[f"{file}.service"][1:]}
        shown = re.search(rf"^{program} (.*?)(?<!\\)$", PAGE, re.M | re.S)
        assert shown is not None
        words = shlex.split(shown[1].replace("\\\n", " "))
        assert {word.partition("=")[0] for word in words} - {"&"} == flags
