"""How a store is reached, from the settings: secrets are read from their files, and networks are to be trusted."""

from __future__ import annotations

import os
import stat
from ipaddress import ip_address
from urllib.parse import urlsplit

from flexkv.config import RemoteConfig
from flexkv.errors import ConfigError
from flexkv.remote.base import StoreOptions

ENCRYPTED = frozenset({"rediss"})
"""Schemes whose servers prove who they are, and whose bytes nobody else reads or changes."""

MOST_SECRET_BYTES = 4096


def store_options(remote: RemoteConfig) -> StoreOptions:
    """
    Raises:
        ConfigError: a file cannot be used, or the network would have to be trusted; says what to do.
    """
    _check_network(remote)
    if remote.stuck_s <= remote.get_s:
        raise ConfigError(
            f"remote.stuck_s={remote.stuck_s:g}: allowed is more than remote.get_s={remote.get_s:g}, which a call may "
            "take"
        )
    return StoreOptions(
        urls=remote.urls,
        user=remote.user,
        password=_secret(remote.password_file) if remote.password_file else "",
        ca_file=_readable(remote.ca_file) if remote.ca_file else "",
        connect_s=remote.get_s,
        ttl_s=remote.ttl_s or 0,
        rdma_devices=remote.rdma_devices,
    )


def client_environment(options: StoreOptions) -> dict[str, str]:
    """Variables that the client's library reads when it is loaded."""
    if options.urls[0].lower().startswith("mooncake:"):
        from flexkv.remote.mooncake import CLIENT_ENVIRONMENT

        return dict(CLIENT_ENVIRONMENT)
    return {}


def _check_network(remote: RemoteConfig) -> None:
    if remote.trusted_network:
        return
    for url in remote.urls:
        parts = urlsplit(url)
        if parts.scheme not in ENCRYPTED and not _is_here(parts.hostname or ""):
            raise ConfigError(
                f"remote.urls: {parts.scheme}://{parts.hostname} is another machine, and sends plain text: whoever is "
                "on the network may read and forge pages. Use rediss://, or set remote.trusted_network=true if all "
                "of it is trusted"
            )


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _readable(path: str) -> str:
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ConfigError(
            f"remote.ca_file={path!r}: {error.strerror}; needed is a file that can be read"
        ) from error


def _secret(path: str) -> str:
    """The first line of a file that only its owner can read."""
    setting = f"remote.password_file={path!r}"
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{setting}: it is no file")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{setting}: others may read it (mode {stat.S_IMODE(status.st_mode):o}): chmod 600 {path}"
                )
            raw = file.read(MOST_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: {error.strerror}; needed is a file with the password") from error
    try:
        secret = raw.decode().split("\n", 1)[0].rstrip("\r")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: it is not UTF-8") from error
    if not secret or len(raw) > MOST_SECRET_BYTES:
        raise ConfigError(
            f"{setting}: its first line is empty, or it has more than {MOST_SECRET_BYTES} bytes"
        )
    return secret
