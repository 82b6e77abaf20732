"""Parses the URLs in `remote.urls` to addresses of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

from flexkv.errors import StoreError
from flexkv.remote.base import masked_url

DEFAULT_PORT = 6379
MOST_DATABASES = 1 << 16
"""Database numbers must be lower than this limit. A server has 16 databases by default."""
ALLOWED = "allowed are redis://HOST[:PORT][/DATABASE] and rediss://..., which is TLS"


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    tls: bool = False

    @property
    def identity(self) -> str:
        """The server's identity, from which the assignment of names to servers is computed. It is the same on all
        machines that use the same host name for the server, with or without TLS.
        """
        return f"{self.host}:{self.port}/{self.database}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_addresses(urls: Sequence[str]) -> list[Address]:
    """Returns the servers' addresses.

    Raises:
        StoreError: a URL is not allowed, or two URLs have the same server. The message shows no password from a URL.
    """
    found: dict[str, Address] = {}
    for url in urls:
        address = _parse(url)
        if address.identity in found:
            raise StoreError(f"remote.urls: {masked_url(url)} is there twice; each server is named once")
        found[address.identity] = address
    if not found:
        raise StoreError(f"remote.urls is empty; {ALLOWED}")
    return list(found.values())


def _parse(url: str) -> Address:
    if "@" in url:
        # The @ may be anywhere: if a password contains a slash, `urlsplit` takes what follows for the path.
        _refuse(url, "a user or password in a URL; use remote.user and remote.password_file")
    try:
        parts = urlsplit(url)
        port = DEFAULT_PORT if parts.port is None else parts.port
    except ValueError:
        # The message leaves out the error's own text, which quotes what was parsed as port or host and may be a
        # password.
        _refuse(url, "its host or port cannot be read; " + ALLOWED)
    if parts.scheme not in ("redis", "rediss"):
        _refuse(url, ALLOWED)
    if parts.query or parts.fragment:
        _refuse(url, "options in a URL are not known; " + ALLOWED)
    if not parts.hostname or not 1 <= port <= 0xFFFF:
        _refuse(url, "no host, or no port from 1 to 65535; " + ALLOWED)
    database = parts.path.removeprefix("/") or "0"
    if not (
        database.isascii() and database.isdigit() and len(database) <= 9 and int(database) < MOST_DATABASES
    ):
        _refuse(url, "the path is the number of a database; " + ALLOWED)
    return Address(parts.hostname, port, int(database), parts.scheme == "rediss")


def _refuse(url: str, why: str) -> NoReturn:
    raise StoreError(f"remote.urls: {masked_url(url)}: {why}") from None
