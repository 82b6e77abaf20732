"""Makes a store's options from the settings. Reads secrets from their files, and refuses unencrypted traffic through a
network that is not declared as trusted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import BinaryIO
from urllib.parse import urlsplit

from flexkv.config import RemoteConfig
from flexkv.errors import ConfigError
from flexkv.remote.base import ALIVE_S, StoreOptions, masked_url

ENCRYPTED = frozenset({"rediss"})
"""URL schemes whose servers are authenticated and whose traffic others can neither read nor change."""

MOST_SECRET_BYTES = 4096
USUAL_STUCK_S = 5.0


def store_options(remote: RemoteConfig) -> StoreOptions:
    """Makes a store's options from the settings.

    Raises:
        ConfigError: a file cannot be used, `remote.stuck_s` is too short, or the settings would require trusting the
            network; the message says what to do.
    """
    _check_network(remote)
    if remote.stuck_s is not None and remote.stuck_s < _longest_s(remote):
        raise ConfigError(
            f"remote.stuck_s={remote.stuck_s:g}: allowed is {_longest_s(remote):g} or more: a call may take "
            f"remote.get_s={remote.get_s:g} or remote.probe_s={remote.probe_s:g}, and then the question "
            f"whether the store is there {ALIVE_S:g} s"
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


def stuck_s(remote: RemoteConfig) -> float:
    """Returns the number of seconds without progress after which a helper is killed. This is `remote.stuck_s` if it is
    set. Otherwise it is USUAL_STUCK_S, or more if the other settings allow a longer call.
    """
    return max(USUAL_STUCK_S, _longest_s(remote)) if remote.stuck_s is None else remote.stuck_s


def _longest_s(remote: RemoteConfig) -> float:
    """Returns the longest time in seconds for which a healthy helper may report no progress: the time of one call, plus
    the time of the check that follows the call and finds out whether the store is alive.
    """
    return max(remote.get_s, remote.probe_s) + ALIVE_S


def client_environment(options: StoreOptions) -> dict[str, str]:
    """The environment variables that the store's client library reads when it is loaded."""
    if options.urls[0].lower().startswith("mooncake:"):
        from flexkv.remote.mooncake import CLIENT_ENVIRONMENT

        return dict(CLIENT_ENVIRONMENT)
    return {}


def _check_network(remote: RemoteConfig) -> None:
    if remote.trusted_network:
        return
    for url in remote.urls:
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError as error:
            raise ConfigError(f"remote.urls={masked_url(url)}: it is no URL: {error}") from error
        if parts.scheme in ENCRYPTED or _is_here(host) or not host:
            continue  # the store refuses a URL without a host
        encrypted = "use rediss://, or set" if parts.scheme == "redis" else "it has no TLS: set"
        raise ConfigError(
            f"remote.urls: {parts.scheme}://{host} is another machine, and sends plain text: whoever is on the network "
            f"may read and forge pages; {encrypted} remote.trusted_network=true if all of it is trusted"
        )


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _opened(setting: str, path: str, needed: str) -> Iterator[BinaryIO]:
    """Opens a regular file. Refuses anything else, such as a pipe, whose opening would wait for a writer."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting}={path!r}: {why}; needed is {needed}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{setting}={path!r}: it is no file; needed is {needed}")
    with open(descriptor, "rb") as file:
        yield file


def _readable(path: str) -> str:
    with _opened("remote.ca_file", path, "a file that can be read"):
        return path


def _secret(path: str) -> str:
    """Reads the first line of a file. Refuses a file that anybody but its owner may access."""
    setting = f"remote.password_file={path!r}"
    with _opened("remote.password_file", path, "a file with the password") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ConfigError(f"{setting}: others may read it (mode {mode:o}): chmod 600 {path}")
        try:
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
