"""Tests `flexkv remote` with a real Redis that holds a real unit's values, and with a real Mooncake in a network
namespace.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flexkv.cli.main import main
from flexkv.cli.remote.bench import CALL_S, PREFIX, TTL_S
from flexkv.cli.remote.stored_value import HEAD, NAME
from flexkv.remote.base import Outcome, Presence, StoreOptions
from flexkv.remote.stores import open_store
from flexkv.remote.values import ValueFormat
from tests.servers.mooncake import mooncake
from tests.servers.namespace import Namespace, network_namespace
from tests.servers.redis import RedisServer, free_port, redis_server
from tests.unit.remote.remote_unit import RemoteUnit, Shape, chain

ROOT = Path(__file__).resolve().parents[3]
Said = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("FLEXKV_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str], url: str) -> None:
        self._capsys, self._url = capsys, url

    def __call__(self, *words: str, **settings: object) -> Said:
        """Runs `flexkv remote` with these words and settings. Returns the exit code, stdout and stderr."""
        extra = {"remote.urls": self._url} | {k.replace("__", "."): v for k, v in settings.items()}
        self._capsys.readouterr()
        code = main(["remote", *words, "--extra", json.dumps(extra)])
        return (code, *self._capsys.readouterr())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], redis: RedisServer) -> Cli:
    assert redis.ask("FLUSHALL") == b"+OK\r\n"
    return Cli(capsys, redis.url)


EVEN = Shape(runs=(1000, 1000, 1000))
UNEVEN = Shape()


def stored(url: str, shape: Shape = UNEVEN, **settings: object) -> list[str]:
    """Makes a unit write two pages to the store. Returns the names of their values."""
    unit = RemoteUnit(url, shape, **settings)  # type: ignore[arg-type]
    keys = chain("prompt", 2)
    unit.store(keys)
    unit.settle()
    setup = unit.plane.link._setup
    form = ValueFormat(setup.owner, setup.groups[0], 0)
    unit.check_no_leaks()
    assert unit.close()
    return [form.name(key.tobytes()) for key in keys]


def change(url: str, name: str, size: int, at: int) -> None:
    """Flips one bit in byte `at` of a value of `size` bytes."""
    store = open_store(StoreOptions((url,)))
    value = np.zeros(size, np.uint8)
    assert store.get([name], [[value]], 5.0) == [Outcome.OK]
    value[at] ^= 1
    assert store.put([name], [[value]], 5.0) == [Outcome.OK]
    store.close()


def size_of(shape: Shape) -> int:
    return shape.ranks * shape.stripe_bytes + HEAD.size + 8 * shape.ranks * len(shape.runs)


# --- ping ---


def test_ping_tells_each_server_and_the_round_trip(cli: Cli, redis: RedisServer) -> None:
    code, out, _ = cli("ping")
    assert code == 0
    assert re.fullmatch(rf"{redis.url}: reached, round trip \d+\.\d\d ms \(.*\)\n", out)


def test_ping_fails_where_one_of_two_servers_is_away(cli: Cli, redis: RedisServer) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    code, out, _ = cli("ping", "--json", remote__urls=[redis.url, away])
    assert code == 1
    here, gone = json.loads(out)
    assert here["why_not"] == ""
    assert here["round_trip_ms"] > 0
    assert "refused" in gone["why_not"]
    assert gone["round_trip_ms"] is None
    assert "not usable" in cli("ping", remote__urls=away)[1]


def test_settings_come_from_the_environment_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, redis: RedisServer
) -> None:
    monkeypatch.setenv("FLEXKV_REMOTE_URLS", redis.url)
    assert main(["remote", "ping"]) == 0
    assert "reached" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("ping",), ("bench",), ("get", "0" * 32), ("drop", "0" * 32)])
def test_without_a_store_the_setting_is_named(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--prefix", f"flexkv/1/{'0' * 32}/0") if "0" * 32 in words else ()
    assert main(["remote", *words, *more]) == 2
    assert "remote.urls is not set" in capsys.readouterr().err


def test_another_machine_in_plain_text_is_refused_before_it_is_called(cli: Cli) -> None:
    code, _, err = cli("ping", remote__urls="redis://store.example:6379")
    assert code == 2
    assert "remote.trusted_network" in err


def test_a_password_is_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret, file = "a-password-of-ours", tmp_path / "password"
    file.write_text(secret)
    file.chmod(0o600)
    with redis_server(tmp_path, ["--requirepass", secret]) as server:
        shown: list[str] = []
        right, wrong = Cli(capsys, server.url), Cli(capsys, server.url.replace("//", f"//:{secret}@"))
        for words in (("ping",), ("bench", "--bytes", "4KiB", "--values", "4"), ("ping", "--json")):
            said = right(*words, remote__password_file=str(file))
            assert said[0] == 0, said
            shown += said[1:]
        file.write_text(f"{secret}-of-others")
        for words in (("ping",), ("bench",)):
            said = right(*words, remote__password_file=str(file))
            assert said[0] == 1, said
            assert "refused" in said[1] + said[2]
            shown += said[1:]
        for url in (wrong, Cli(capsys, f"{server.url}?password={secret}")):
            said = url("ping")
            assert said[0] == 2
            shown += said[1:]
        assert secret not in "".join(shown)


# --- bench ---


def test_bench_measures_compares_and_leaves_nothing(cli: Cli, redis: RedisServer) -> None:
    code, out, err = cli("bench", "--bytes", "64KiB", "--values", "24", "--batch", "8", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert [(row["what"], row["per_call"], row["good"], row["failed"]) for row in result["rows"]] == [
        ("put", 1, 16, 0),
        ("put", 8, 24, 0),
        ("exists", 1, 256, 0),
        ("exists", 256, 2048, 0),
        ("get", 1, 16, 0),
        ("get", 8, 24, 0),
    ]
    assert all(row["rate"] > 0 for row in result["rows"])
    assert [row["ratio"] is not None for row in result["rows"]] == [False, True] * 3
    assert (result["wrong"], result["left"], result["removed"]) == (0, [], 40)
    assert redis.ask("DBSIZE") == b":0\r\n"
    code, out, _ = cli("bench", "--bytes", "4KiB", "--values", "1")
    assert code == 0
    assert "GB/s" in out


def test_what_a_killed_bench_leaves_goes_by_itself(redis: RedisServer) -> None:
    assert redis.ask("FLUSHALL") == b"+OK\r\n"
    url = json.dumps({"remote.urls": redis.url})
    command = [sys.executable, "-m", "flexkv", "remote", "bench", "--bytes", "1MiB", "--values", "300"]
    process = subprocess.Popen([*command, "--extra", url], cwd=ROOT)
    try:
        while redis.ask("DBSIZE") == b":0\r\n":
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    name = redis.ask("RANDOMKEY").split(b"\r\n")[1].decode()
    assert name.startswith(PREFIX)
    assert NAME.fullmatch(name) is None
    assert 0 < int(redis.ask("TTL", name)[1:]) <= TTL_S


def test_bench_says_that_a_store_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server(tmp_path, maxmemory=8 << 20) as server:
        code, out, err = Cli(capsys, server.url)("bench", "--bytes", "1MiB", "--values", "32", "--json")
        result = json.loads(out)
        assert code == 1, err
        assert "OOM" in result["reason"]
        assert any(row["failed"] for row in result["rows"] if row["what"] == "put")
        assert result["left"] == []
        assert result["removed"] == sum(row["good"] for row in result["rows"] if row["what"] == "put")
        assert server.ask("DBSIZE") == b":0\r\n"


def test_bench_of_a_mute_store_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redis_server(tmp_path) as server:
        server.freeze()
        begun_s = time.monotonic()
        code, _, err = Cli(capsys, server.url)("bench", "--seconds", "1")
        assert time.monotonic() - begun_s < CALL_S, "no call had its whole time"
        assert code == 1
        assert "the store is not there" in err


@pytest.mark.parametrize("size", ["1", "2GiB", "40G", "-3", "100MiB"])
def test_bench_is_bounded(cli: Cli, size: str) -> None:
    code, _, err = cli("bench", "--bytes", size)
    assert code == 2
    assert "--bytes" in err


# --- get ---


def test_get_tells_what_a_value_is(cli: Cli, redis: RedisServer) -> None:
    names = stored(redis.url, EVEN, remote__ttl_s=600)
    code, out, _ = cli("get", *names, "--json")
    assert code == 0
    for name, value in json.loads(out).items():
        assert value["fault"] == ""
        assert value["bytes"] == size_of(EVEN)
        assert value["key"] == name.rpartition("/")[2]
        assert (value["tokens"], value["group"]) == (4, 0)
        assert value["expiry"] == value["written"] + 600
        assert value["runs"] == value["runs_matching"] == 6
    code, out, _ = cli("get", names[0])
    assert "a whole value" in out
    assert "all 6 match" in out


def test_get_says_what_it_cannot_compare(cli: Cli, redis: RedisServer) -> None:
    name, _ = stored(redis.url)
    code, out, _ = cli("get", name)
    assert code == 0
    assert "6, not compared" in out
    assert "expiry    never" in out


def test_get_takes_a_key_behind_a_prefix(cli: Cli, redis: RedisServer) -> None:
    name, _ = stored(redis.url, EVEN)
    prefix, _, key = name.rpartition("/")
    assert cli("get", key, "--prefix", prefix)[0] == 0
    code, _, err = cli("get", key)
    assert code == 2
    assert "--prefix" in err
    assert cli("get", key, "--prefix", "flexkv/1")[0] == 2


@pytest.mark.parametrize(
    ("at", "code", "words"),
    [
        (5, 0, "5 of 6 match"),  # not an error, because runs may differ in size
        (-1, 1, "its trailer is damaged"),
        (6 * 1000 + 68, 1, "its trailer is damaged"),
        (6 * 1000, 1, "no trailer"),
    ],
    ids=["stripe", "run digest", "tokens", "magic"],
)
def test_get_finds_a_changed_bit(cli: Cli, redis: RedisServer, at: int, code: int, words: str) -> None:
    name, _ = stored(redis.url, EVEN)
    change(redis.url, name, size_of(EVEN), at)
    said = cli("get", name)
    assert words in said[1]
    assert said[0] == code


def test_get_fails_for_absent_swapped_and_expired_values(cli: Cli, redis: RedisServer) -> None:
    one, other = stored(redis.url, EVEN)
    code, out, _ = cli("get", one[:-4] + "0000", one)
    assert code == 1
    assert "not in the store" in out
    store = open_store(StoreOptions((redis.url,)))
    value = np.zeros(size_of(EVEN), np.uint8)
    assert store.get([one], [[value]], 5.0) == [Outcome.OK]
    assert store.put([other], [[value]], 5.0) == [Outcome.OK]
    assert store.put([one], [[value[:-8]]], 5.0) == [Outcome.OK]
    store.close()
    code, out, _ = cli("get", other)
    assert code == 1
    assert "another page's" in out
    code, out, _ = cli("get", one)
    assert code == 1
    assert "no trailer" in out


def test_a_value_is_shown_though_it_is_long(cli: Cli, redis: RedisServer) -> None:
    """`flexkv remote get` shows a value that is longer than the command's first read. The command reads values up to a
    limit in order to learn their length, and this value exceeds the limit.
    """
    shape = Shape(runs=(3 << 20,), ranks=2)
    name, _ = stored(redis.url, shape, host_bytes=64 << 20)
    code, out, _ = cli("get", name)
    assert code == 0
    assert f"{size_of(shape)} bytes" in out
    assert "all 2 match" in out


def test_a_long_value_of_somebody_else_is_no_work(cli: Cli, redis: RedisServer) -> None:
    """`flexkv remote get` does not spend long on a long value of another program. This value repeats the word with
    which a trailer begins, and has no trailer.
    """
    name = f"flexkv/1/{'0' * 32}/0/{'1' * 32}"
    store = open_store(StoreOptions((redis.url,)))
    value = np.frombuffer(b"FKVPAGE1" * (8 << 20), np.uint8)
    assert store.put([name], [[value]], 60.0) == [Outcome.OK]
    code, out, _ = cli("get", name)
    assert code == 1
    assert "no trailer ends it" in out
    store.remove([name], 60.0)
    store.close()


def test_get_of_several_says_what_there_is(cli: Cli, redis: RedisServer) -> None:
    one, other = stored(redis.url)
    absent = f"flexkv/1/{'0' * 32}/0/{'1' * 32}"
    code, out, _ = cli("get", one, absent, other)
    assert code == 1
    assert out.count("a whole value") == 2
    assert f"{absent}: not in the store" in out


# --- drop ---


def test_drop_removes_what_is_named_and_nothing_else(cli: Cli, redis: RedisServer) -> None:
    one, other = stored(redis.url)
    assert redis.ask("SET", "somebody", "else") == b"+OK\r\n"
    code, out, _ = cli("drop", one)
    assert (code, out) == (0, f"{one}: removed\n")
    store = open_store(StoreOptions((redis.url,)))
    assert store.exists([one, other], 5.0) == [Presence.NO, Presence.YES]
    store.close()
    code, _, err = cli("drop", "somebody")
    assert code == 2
    assert "no name of a value" in err
    assert cli("drop", "flexkv/*")[0] == 2
    assert redis.ask("EXISTS", "somebody") == b":1\r\n"
    assert cli("drop", one)[:2] == (0, f"{one}: was not there\n")


def test_drop_fails_where_the_store_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    gone = Cli(capsys, f"redis://127.0.0.1:{free_port()}")
    code, out, err = gone("drop", f"flexkv/1/{'0' * 32}/0/{'1' * 32}")
    assert code == 1
    assert "NOT REMOVED" in out
    assert "refused" in err
    code, _, err = gone("get", f"flexkv/1/{'0' * 32}/0/{'1' * 32}")
    assert code == 2
    assert "refused" in err


# --- Mooncake ---


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    with network_namespace() as found:
        yield found


def inside(namespace: Namespace, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    extra = json.dumps({"remote.urls": url})
    command = [sys.executable, "-m", "flexkv", "remote", *words, "--extra", extra]
    return subprocess.run(namespace.command(command), cwd=ROOT, capture_output=True, text=True, timeout=120)


STORED = """
import sys
from tests.unit.cli.test_remote_cli import EVEN, stored
print(*stored(sys.argv[1], EVEN))
"""


def test_mooncake_is_asked_in_a_process_with_its_variables(namespace: Namespace, tmp_path: Path) -> None:
    with mooncake(namespace, tmp_path) as (master, owner):
        said = inside(namespace, master.url, "ping")
        assert said.returncode == 0, said
        assert "reached" in said.stdout
        said = inside(namespace, master.url, "bench", "--bytes", "256KiB", "--values", "16", "--json")
        assert said.returncode == 0, said
        result = json.loads(said.stdout)
        assert all(row["failed"] == 0 for row in result["rows"])
        assert (result["removed"], result["wrong"]) == (32, 0)
        made = namespace.command([sys.executable, "-c", STORED, master.url])
        names = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout.split()
        assert len(names) == 2
        said = inside(namespace, master.url, "get", *names)
        assert said.returncode == 0, said
        assert said.stdout.count("all 6 match") == 2
        assert inside(namespace, master.url, "drop", names[0]).returncode == 0
        said = inside(namespace, master.url, "get", *names)
        assert said.returncode == 1
        assert said.stdout.count("not in the store") == 1
        owner.kill()
        said = inside(namespace, master.url, "bench", "--bytes", "256KiB", "--values", "2", "--seconds", "5")
        assert said.returncode == 1, said
        assert "failed" in said.stderr


def test_a_dead_master_is_told_in_words(namespace: Namespace) -> None:
    said = inside(namespace, "mooncake://127.0.0.1:50999", "ping")
    assert said.returncode == 1, said
    assert "cannot be reached" in said.stdout
    assert "Traceback" not in said.stderr
