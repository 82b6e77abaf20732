"""A unit refuses to start if it cannot fulfil the settings of its remote tier. The error message says what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flexkv.config import load_config
from flexkv.errors import ConfigError
from flexkv.remote.settings import store_options, stuck_s
from flexkv.unit.start_check import start_faults


def options(**settings: object) -> object:
    values = {f"remote.{name}": value for name, value in settings.items()}
    return store_options(load_config(values, {}).remote)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"urls": "redis://10.1.2.3:6379"}, "remote.trusted_network"),
        ({"urls": "mooncake://store.example:50051"}, "remote.trusted_network"),
        ({"urls": "redis://127.0.0.1", "get_s": 5, "stuck_s": 5}, "allowed is 6 or more"),
        ({"urls": "redis://127.0.0.1", "probe_s": 4.5, "stuck_s": 5}, "allowed is 5.5 or more"),
        ({"urls": "redis://[::1"}, "it is no URL"),
        ({"urls": "rediss://127.0.0.1", "ca_file": "/tmp"}, "it is no file"),
        ({"urls": "redis://127.0.0.1", "password_file": "/nowhere/secret"}, "No such file"),
        ({"urls": "redis://127.0.0.1", "password_file": "/dev/null"}, "it is no file"),
        ({"urls": "rediss://127.0.0.1", "ca_file": "/nowhere/ca.pem"}, "remote.ca_file"),
    ],
)
def test_what_cannot_be_had_is_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(**settings)
    faults = start_faults(load_config({f"remote.{n}": v for n, v in settings.items()}, {}), 1, {})
    assert any(words in str(fault) for fault in faults)


@pytest.mark.parametrize("setting", ["password_file", "ca_file"])
def test_a_pipe_is_no_file_and_nothing_waits_for_it(tmp_path: Path, setting: str) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="it is no file"):
        options(urls="rediss://127.0.0.1", **{setting: str(tmp_path / "pipe")})


def test_control_the_longest_calls_that_are_allowed() -> None:
    assert options(urls="redis://127.0.0.1", get_s=4, probe_s=4, stuck_s=5)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [({}, 5.0), ({"probe_s": 10}, 11.0), ({"get_s": 7.5}, 8.5), ({"stuck_s": 3.5}, 3.5)],
)
def test_one_longer_call_needs_no_second_setting(settings: dict[str, object], seconds: float) -> None:
    assert options(urls="redis://127.0.0.1", **settings)
    assert stuck_s(load_config({f"remote.{n}": v for n, v in settings.items()}, {}).remote) == seconds


@pytest.mark.parametrize(
    "settings",
    [
        {"urls": "redis://10.1.2.3", "trusted_network": True},
        {"urls": "rediss://10.1.2.3"},
        {"urls": "redis://[::1]:6379"},
        {"urls": "redis://localhost,redis://127.8.9.1"},
    ],
)
def test_control_what_can_be_had_is_taken(settings: dict[str, object]) -> None:
    assert options(**settings)


@pytest.mark.parametrize(
    "urls", ["redis://me:secret@127.0.0.1", "127.0.0.1:6379", "redis://127.0.0.1,redis://127.0.0.1"]
)
def test_urls_that_are_none_are_refused_and_no_secret_is_shown(urls: str) -> None:
    with pytest.raises(ConfigError, match=r"remote\.urls") as refused:
        options(urls=urls)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("mode", "content", "words"), [(0o644, "pw\n", "chmod 600"), (0o600, "\n", "empty")])
def test_a_secret_that_others_can_read_is_refused(
    tmp_path: Path, mode: int, content: str, words: str
) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=words) as refused:
        options(urls="redis://127.0.0.1", password_file=str(file))
    assert "pw" not in str(refused.value)


def test_a_secret_is_in_no_repr(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("open sesame\nanother line\n")
    file.chmod(0o600)
    found = store_options(
        load_config({"remote.urls": "redis://127.0.0.1", "remote.password_file": str(file)}, {}).remote
    )
    assert found.password == "open sesame"
    assert "sesame" not in repr(found)
