"""Tests of logging in to a Redis server with a user and a password, checking the server's certificate, and hiding
passwords in all messages.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexkv.errors import StoreError
from flexkv.remote.base import Outcome, Presence, StoreOptions
from flexkv.remote.redis.address import Address, parse_addresses
from flexkv.remote.stores import open_store
from tests.servers.redis import RedisServer, redis_server
from tests.unit.remote.redis_fake import FakeRedis, says
from tests.unit.remote.redis_values import Guarded, drawn

DEADLINE_S = 60.0
PASSWORD = "sesame-open-1"
RULES = ["on", f">{PASSWORD}", "~flexkv/*", "+ping", "+exists", "+get", "+set", "+unlink"]


@pytest.fixture(scope="module")
def guarded_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis server that admits two users: `flexkv`, and the default user, who has a different password."""
    folder = tmp_path_factory.mktemp("guarded")
    with redis_server(folder, ["--user", "flexkv", *RULES, "--requirepass", "other-1"]) as server:
        yield server


def test_a_user_with_the_named_rights_can_do_all(guarded_redis: RedisServer) -> None:
    store = open_store(StoreOptions((guarded_redis.url,), user="flexkv", password=PASSWORD))
    value, memory = drawn(1000, 1), Guarded([1000])
    assert store.alive(DEADLINE_S) == ""
    assert store.put(["flexkv/a"], [[value]], DEADLINE_S) == [Outcome.OK]
    assert store.exists(["flexkv/a"], DEADLINE_S) == [Presence.YES]
    assert store.get(["flexkv/a"], [memory.parts], DEADLINE_S) == [Outcome.OK]
    assert memory.bytes() == value.tobytes()
    assert store.remove(["flexkv/a"], DEADLINE_S) == [True]
    assert store.put(["others/a", "flexkv/b"], [[value]] * 2, DEADLINE_S) == [Outcome.FAILED, Outcome.OK]
    assert "NOPERM" in store.last_error
    store.close()


def test_a_password_alone_is_the_default_users(guarded_redis: RedisServer) -> None:
    store = open_store(StoreOptions((guarded_redis.url + "/2",), password="other-1"))
    assert store.alive(DEADLINE_S) == ""
    store.close()


@pytest.mark.parametrize(
    ("user", "password", "why"),
    [
        ("flexkv", "wrong-password-1", "AUTH was refused: WRONGPASS"),
        ("nobody", PASSWORD, "AUTH was refused: WRONGPASS"),
        ("", "wrong-password-1", "AUTH was refused: WRONGPASS"),
        ("", "", "NOAUTH"),
    ],
)
def test_others_are_refused_with_the_reason(
    guarded_redis: RedisServer, user: str, password: str, why: str
) -> None:
    store = open_store(StoreOptions((guarded_redis.url,), user=user, password=password))
    assert why in store.alive(DEADLINE_S)
    assert store.exists(["flexkv/a"], DEADLINE_S) == [Presence.UNKNOWN]
    assert store.put(["flexkv/a"], [[drawn(9, 1)]], DEADLINE_S) == [Outcome.FAILED]
    assert store.remove(["flexkv/a"], DEADLINE_S) == [False]
    assert why in store.last_error
    assert not password or password not in store.last_error
    store.close()


def test_a_server_that_quotes_the_password_is_not_quoted() -> None:
    quoted = f"-ERR unknown command 'AUTH', with args beginning with: '{PASSWORD}'\r\n".encode()
    shortened = f"-ERR unknown command 'AUTH', with args beginning with: '{PASSWORD[:9]}\r\n".encode()
    for said in (quoted, shortened, f"-{PASSWORD}\r\n".encode(), b"+OK\r\n" + quoted):
        with FakeRedis(says(said)) as server:
            store = open_store(StoreOptions((server.url,), password=PASSWORD))
            reason = store.alive(DEADLINE_S)
            assert reason
            assert PASSWORD[:9] not in reason + store.last_error
            store.close()


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes certificates. The authority ca.pem has signed `good`, for 127.0.0.1, and `elsewhere`, for another host. The
    authority other.pem has signed neither of these two certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in ("ca", "other"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        openssl(folder, "req", "-x509", *key, "-subj", f"/CN={name}", "-days", "30", *files)
    for name, host in [("good", "IP:127.0.0.1"), ("elsewhere", "DNS:elsewhere.example")]:
        openssl(folder, "req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        (folder / "host").write_text(f"subjectAltName={host}\n")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", "host"]
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


def tls_options(folder: Path, name: str) -> list[str]:
    files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca-cert": "ca.pem"}
    named = [word for kind, file in files.items() for word in (f"--tls-{kind}-file", str(folder / file))]
    return [*named, "--tls-auth-clients", "no"]


def test_values_come_back_through_tls(certificates: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path, tls_options(certificates, "good"), tls=True) as server:
        store = open_store(StoreOptions((server.url,), ca_file=str(certificates / "ca.pem")))
        assert store.alive(DEADLINE_S) == ""
        names = [f"name {number}" for number in range(12)]
        sizes = [2 << 20, 12_345]
        values = [[drawn(size, number) for size in sizes] for number in range(12)]
        memory = [Guarded(sizes) for _ in names]
        assert set(store.put(names, values, DEADLINE_S)) == {Outcome.OK}
        assert set(store.get(names, [guarded.parts for guarded in memory], DEADLINE_S)) == {Outcome.OK}
        for value, guarded in zip(values, memory, strict=True):
            assert guarded.bytes() == b"".join(part.tobytes() for part in value)
            guarded.check()
        assert store.get(names[:1], [Guarded([5]).parts], DEADLINE_S) == [Outcome.OTHER_SIZE]
        assert store.exists([*names, "none"], DEADLINE_S) == [Presence.YES] * 12 + [Presence.NO]
        server.stop()
        server.start()
        assert store.exists(names[:1], DEADLINE_S) == [Presence.NO]
        server.freeze()
        assert store.exists(names[:1], 0.3) == [Presence.UNKNOWN]
        assert store.exists(names[:1], 0.3) == [Presence.UNKNOWN]
        store.close()


@pytest.mark.parametrize(
    ("certificate", "ca_file", "why"),
    [
        ("good", "other.pem", "not trusted"),
        ("elsewhere", "ca.pem", "not trusted"),
        ("good", "", "not trusted"),
    ],
)
def test_a_server_that_is_not_who_it_must_be_gets_nothing(
    certificates: Path, tmp_path: Path, certificate: str, ca_file: str, why: str
) -> None:
    with redis_server(tmp_path, tls_options(certificates, certificate), tls=True) as server:
        store = open_store(
            StoreOptions((server.url,), password=PASSWORD, ca_file=ca_file and str(certificates / ca_file))
        )
        assert why in store.alive(DEADLINE_S)
        assert store.exists(["a"], DEADLINE_S) == [Presence.UNKNOWN]
        store.close()


def test_tls_to_a_server_without_it_fails(guarded_redis: RedisServer) -> None:
    store = open_store(StoreOptions((guarded_redis.url.replace("redis:", "rediss:"),), connect_s=0.3))
    assert "TLS" in store.alive(DEADLINE_S)
    store.close()


def test_urls_name_servers() -> None:
    urls = ["redis://a", "redis://b:7000/", "redis://[::1]:7/3"]
    assert parse_addresses(urls) == [Address("a"), Address("b", 7000), Address("::1", 7, 3)]
    assert parse_addresses(["REDISS://Host.example"]) == [Address("host.example", tls=True)]
    assert str(Address("::1", 7, 3)) == "[::1]:7"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"redis://:{PASSWORD}@host", "remote.password_file"),
        (f"redis://user:{PASSWORD}@host:6379/0", "remote.password_file"),
        (f"redis://:{PASSWORD}/x@host", "remote.password_file"),
        (f"redis://:{PASSWORD}?#@host", "remote.password_file"),
        (f"redis://:x@{PASSWORD}@host", "remote.password_file"),
        (f"redis://host?password={PASSWORD}", "options"),
        ("redis://", "no host"),
        ("redis://:6379", "no host"),
        ("redis://host:0", "port"),
        ("redis://host:70000", "port"),
        ("redis://host:x", "port"),
        ("redis://[::1", "cannot be read"),
        ("redis://host/x", "database"),
        ("redis://host/-1", "database"),
        ("redis://host/0/1", "database"),
        ("redis://host/999999999999", "database"),
        ("redis://host,redis://host", "twice"),
        ("redis://host,redis://HOST:6379/0", "twice"),
        (f"redis://host,http://:{PASSWORD}@host", "one scheme"),
    ],
)
def test_wrong_urls_are_refused_without_their_password(url: str, why: str) -> None:
    options = StoreOptions(tuple(url.split(",")))
    with pytest.raises(StoreError, match=r"remote\.urls") as refused:
        open_store(options)
    assert why in str(refused.value)
    assert PASSWORD not in str(refused.value) + repr(options)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="password_file"):
        open_store(StoreOptions(("redis://host",), user="flexkv"))
    with pytest.raises(StoreError, match="rediss"):
        open_store(StoreOptions(("redis://host",), ca_file="ca.pem"))
    (tmp_path / "empty").write_text("")
    for ca_file in ("empty", "absent"):
        with pytest.raises(StoreError, match="ca_file"):
            open_store(StoreOptions(("rediss://host",), ca_file=str(tmp_path / ca_file)))


def test_what_redis_does_not_have_is_refused() -> None:
    with pytest.raises(StoreError, match=r"remote\.rdma_devices must be empty"):
        open_store(StoreOptions(("redis://127.0.0.1",), rdma_devices=("mlx5_0",)))
