"""The URL of a ValkeyStore.

::

    valkey://[USER:PASSWORD@]HOST[:PORT][/DB]      redis:// means the same
    valkeys://…                                    with TLS; rediss:// means the same
    unix://[USER:PASSWORD@]/PATH/OF/SOCKET
    valkey+cluster://HOST:PORT,HOST:PORT…          seeds of a cluster
    valkey+sentinel://HOST:PORT,…/MASTER[/DB]      sentinels and the name of what they watch

No error, log line or repr shows any part of the URL but names of parameters.
"""

from __future__ import annotations

import difflib
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from kvcm.core.errors import ConfigError
from kvcm.metaindex.stores.valkey_scripts import SOURCES
from kvcm.metaindex.stores.valkey_wire import Address, Command, Link

T = TypeVar("T")

PORT = 6379
SENTINEL_PORT = 26379
SCHEMES = frozenset(
    name + tls + kind
    for name in ("redis", "valkey")
    for tls in ("", "s")
    for kind in ("", "+cluster", "+sentinel")
) | {"unix"}
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_TLS_WORDS = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}


class Kind(Enum):
    """How servers are found."""

    SINGLE = "single"
    CLUSTER = "cluster"
    SENTINEL = "sentinel"


@dataclass(frozen=True, slots=True)
class ValkeyConfig:
    """What a URL says; times in seconds."""

    kind: Kind
    addresses: tuple[Address, ...]
    tls: bool = False
    username: str = ""
    password: bytes = field(default=b"", repr=False)
    db: int = 0
    master: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def wait_replicas(self) -> int:
        """Replicas that must have a commit before bytes may be deleted for it."""
        return int(self.options.get("wait_replicas", 0))

    @property
    def wait_timeout_ms(self) -> int:
        """How long such a wait may take."""
        return int(self.options.get("wait_timeout_ms", 500))

    def link(self) -> Link:
        """How to talk to the servers; ConfigError when TLS files cannot be used."""
        greeting = _auth(self.username, self.password)
        if self.db:
            greeting.append((b"SELECT", b"%d" % self.db))
        greeting += [(b"SCRIPT", b"LOAD", source) for source in SOURCES.values()]
        return self._link(greeting)

    def sentinel_link(self) -> Link:
        """How to talk to the sentinels."""
        password = self.options.get("sentinel_password_file", b"")
        return self._link(_auth(self.options.get("sentinel_username", ""), password))

    def _link(self, greeting: list[Command]) -> Link:
        options = self.options
        return Link(
            greeting=greeting,
            tls=_tls_context(options) if self.tls else None,
            connect_timeout_s=options.get("connect_timeout_ms", 1_000) / 1_000,
            timeout_s=options.get("timeout_ms", 2_000) / 1_000,
            connections_max=options.get("connections_max", 32),
        )


def is_valkey_url(url: str) -> bool:
    """Whether the scheme is one of ours."""
    return url.partition("://")[0].lower() in SCHEMES and "://" in url


def parse_url(url: str, password: str = "") -> ValkeyConfig:
    """Read a URL; ``password`` serves when the URL names none.

    Raises:
        ConfigError: says which part is wrong, and never shows it.
    """
    scheme, mark, rest = url.partition("://")
    scheme = scheme.lower()
    if not mark or scheme not in SCHEMES:
        raise ConfigError(f"the index URL begins with none of {', '.join(sorted(SCHEMES))}")
    _check_characters(rest)
    base, _, query = rest.partition("?")
    authority, slash, path = base.partition("/")
    user_info, at, hosts = authority.rpartition("@")
    if "@" in user_info or "@" in path:
        raise ConfigError("the index URL has an @ too many; in a password write %40")
    username, colon, given = user_info.partition(":")
    if ":" in given:
        raise ConfigError("the index URL has a : too many before the @; in a password write %3A")
    options = _options(query)
    kind = Kind(scheme.partition("+")[2] or "single")
    common: dict[str, Any] = {
        "kind": kind,
        "tls": scheme.partition("+")[0] in ("rediss", "valkeys"),
        "username": _text(username, "user name"),
        "password": _password(_bytes(given) if at and colon else b"", options, password),
        "options": options,
    }
    if scheme == "unix":
        if hosts or not path:
            raise ConfigError("the index URL unix:// needs the absolute path of a socket")
        socket = _text(slash + path, "path")
        return ValkeyConfig(
            addresses=(Address("", path=socket),), db=options.get("db", 0), **common
        )
    port = SENTINEL_PORT if kind is Kind.SENTINEL else PORT
    addresses = tuple(_address(text, port) for text in hosts.split(","))
    if len(addresses) > 1 and kind is Kind.SINGLE:
        raise ConfigError("the index URL names several servers; is it +cluster or +sentinel?")
    master = ""
    if kind is Kind.SENTINEL:
        name, _, path = path.partition("/")
        master = _text(name, "name of the master")
        if not master:
            raise ConfigError("the index URL of sentinels lacks the master's name after a /")
    db = options.get("db", 0)
    if path.strip("/"):
        db = _number("database", 0, 1 << 15)(path.strip("/"))
    if db and kind is Kind.CLUSTER:
        raise ConfigError("the index URL of a cluster names a database; clusters have only one")
    return ValkeyConfig(addresses=addresses, master=master, db=db, **common)


def _check_characters(text: str) -> None:
    if "#" in text:
        raise ConfigError("the index URL has a #; in a password write %23")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError("the index URL has characters that must be percent-encoded (as UTF-8)")
    if _BAD_PERCENT.search(text):
        raise ConfigError("the index URL has a % without two hex digits; in a password write %25")
    if text.count("?") > 1:
        raise ConfigError("the index URL has a ? too many; in a password write %3F")


def _address(text: str, default_port: int) -> Address:
    host, colon, port = text, "", ""
    if text.startswith("["):
        host, bracket, after = text[1:].partition("]")
        if not bracket or (after and not after.startswith(":")) or ":" not in host:
            raise ConfigError("the index URL has a wrong IPv6 address; write [::1]:6379")
        colon, port = after[:1], after[1:]
    elif text.count(":") > 1:
        raise ConfigError("the index URL has a : too many in a server; IPv6 is written [::1]:6379")
    else:
        host, colon, port = text.partition(":")
    if not host:
        raise ConfigError("the index URL lacks a server's name")
    if not colon:
        return Address(_text(host, "server"), default_port)
    return Address(_text(host, "server"), _number("port", 1, 65_535)(port))


def _auth(username: str, password: bytes) -> list[Command]:
    if username and username != "default":
        return [(b"AUTH", username.encode(), password)]
    return [(b"AUTH", password)] if password else []


def _bytes(text: str) -> bytes:
    return unquote_to_bytes(text)


def _text(text: str, what: str) -> str:
    try:
        return _bytes(text).decode()
    except UnicodeDecodeError:
        raise ConfigError(f"the {what} in the index URL is not UTF-8") from None


def _password(in_url: bytes, options: Mapping[str, Any], password: str) -> bytes:
    in_file = options.get("password_file", b"")
    if in_url and in_file:
        raise ConfigError("the index URL has a password and a password_file: one of them is enough")
    return in_url or in_file or password.encode()


def _number(what: str, least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (
            text.isascii() and text.isdigit() and len(text) < 12 and least <= int(text) <= most
        ):
            raise ConfigError(f"the {what} in the index URL is not a number from {least} to {most}")
        return int(text)

    return read


def _file(what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        path = _text(text, what)
        if not Path(path).is_file():
            raise ConfigError(f"{what} in the index URL: {path} is no file")
        return path

    return read


def _secret(what: str) -> Callable[[str], bytes]:
    def read(text: str) -> bytes:
        path = Path(_text(text, what))
        try:
            secret = path.read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise ConfigError(f"{what} in the index URL: {path}: {error.strerror}") from None
        if not secret:
            raise ConfigError(f"{what} in the index URL: {path} is empty")
        return secret

    return read


def _choice(what: str, choices: Mapping[str, T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        if text not in choices:
            raise ConfigError(f"{what} in the index URL is none of {', '.join(choices)}")
        return choices[text]

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "db": _number("database", 0, 1 << 15),
    "password_file": _secret("password_file"),
    "sentinel_username": lambda text: _text(text, "sentinel_username"),
    "sentinel_password_file": _secret("sentinel_password_file"),
    "timeout_ms": _number("timeout_ms", 10, 600_000),
    "connect_timeout_ms": _number("connect_timeout_ms", 10, 600_000),
    "connections_max": _number("connections_max", 1, 4_096),
    "wait_replicas": _number("wait_replicas", 0, 64),
    "wait_timeout_ms": _number("wait_timeout_ms", 1, 600_000),
    "ssl_ca_certs": _file("ssl_ca_certs"),
    "ssl_certfile": _file("ssl_certfile"),
    "ssl_keyfile": _file("ssl_keyfile"),
    "ssl_cert_reqs": _choice("ssl_cert_reqs", _TLS_WORDS),
    "ssl_check_hostname": _choice("ssl_check_hostname", {"true": True, "false": False}),
}


def _options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        reader = _READERS.get(name)
        if reader is None:
            # Not shown unless it is near to one of ours: it may be the end of a raw password.
            close = difflib.get_close_matches(name, _READERS, n=1, cutoff=0.7)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ConfigError(f"the index URL has a parameter that is not known{hint}")
        if name in options:
            raise ConfigError(f"the index URL has {name} twice")
        options[name] = reader(value)
    return options


def _tls_context(options: Mapping[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    requirement = options.get("ssl_cert_reqs", ssl.CERT_REQUIRED)
    # In this order: a context that checks names refuses to take any certificate.
    context.check_hostname = options.get("ssl_check_hostname", requirement is ssl.CERT_REQUIRED)
    context.verify_mode = requirement
    try:
        if "ssl_ca_certs" in options:
            context.load_verify_locations(options["ssl_ca_certs"])
        if "ssl_certfile" in options:
            # The password keeps OpenSSL from asking for one on the terminal.
            context.load_cert_chain(
                options["ssl_certfile"], options.get("ssl_keyfile"), password=""
            )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS files of the index URL: {error}") from None
    return context
