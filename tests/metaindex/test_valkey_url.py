"""URLs of a ValkeyStore: every form, clear errors, and no password anywhere."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from kvcm.core.errors import ConfigError
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.metaindex.stores.valkey_url import Kind, ValkeyConfig, parse_url
from kvcm.metaindex.stores.valkey_wire import Address

HARD = "p@ss:/#%?é"
SECRET = "hunter2"


def addresses(config: ValkeyConfig) -> list[str]:
    return [str(address) for address in config.addresses]


@pytest.mark.parametrize(
    ("url", "kind", "servers", "tls", "db"),
    [
        ("redis://h", Kind.SINGLE, ["h:6379"], False, 0),
        ("valkey://h:1/3", Kind.SINGLE, ["h:1"], False, 3),
        ("rediss://h", Kind.SINGLE, ["h:6379"], True, 0),
        ("valkeys://h", Kind.SINGLE, ["h:6379"], True, 0),
        ("VALKEY://h/", Kind.SINGLE, ["h:6379"], False, 0),
        ("redis://h?db=4", Kind.SINGLE, ["h:6379"], False, 4),
        ("valkey://[::1]:7/2", Kind.SINGLE, ["[::1]:7"], False, 2),
        ("valkey://[fe80::1]", Kind.SINGLE, ["[fe80::1]:6379"], False, 0),
        ("unix:///run/v.sock", Kind.SINGLE, ["/run/v.sock"], False, 0),
        ("unix:///run/v.sock?db=2", Kind.SINGLE, ["/run/v.sock"], False, 2),
        ("redis+cluster://a:1,b:2", Kind.CLUSTER, ["a:1", "b:2"], False, 0),
        ("valkeys+cluster://a,[::1]:2", Kind.CLUSTER, ["a:6379", "[::1]:2"], True, 0),
        ("valkey+sentinel://a,b:2/main/1", Kind.SENTINEL, ["a:26379", "b:2"], False, 1),
        ("redis+sentinel://a/main", Kind.SENTINEL, ["a:26379"], False, 0),
    ],
)
def test_urls_name_servers(url: str, kind: Kind, servers: list[str], tls: bool, db: int) -> None:
    config = parse_url(url)
    assert (config.kind, addresses(config), config.tls, config.db) == (kind, servers, tls, db)
    assert config.master == ("main" if kind is Kind.SENTINEL else "")


@pytest.mark.parametrize("scheme", ["redis://{}h", "valkey+cluster://{}a,b", "unix://{}/s"])
def test_a_password_of_any_characters_is_percent_encoded(scheme: str) -> None:
    config = parse_url(scheme.format(f"us%40er:{quote(HARD, safe='')}@"))
    assert (config.username, config.password) == ("us@er", HARD.encode())
    assert parse_url(scheme.format("")).password == b""
    assert parse_url(scheme.format(":pw@")).link().greeting[0] == (b"AUTH", b"pw")


def test_a_password_comes_from_a_file_or_from_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(HARD + "\n")
    assert parse_url(f"redis://h?password_file={file}").password == HARD.encode()
    assert parse_url("redis://h", HARD).password == HARD.encode()
    assert parse_url("redis://:other@h", HARD).password == b"other"
    with pytest.raises(ConfigError, match="one of them is enough"):
        parse_url(f"redis://:x@h?password_file={file}")
    with pytest.raises(ConfigError, match="No such file"):
        parse_url(f"redis://h?password_file={file}x")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        parse_url(f"redis://h?password_file={file}")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"redis://user:{HARD}@host:6379/0", "#.*%23"),
        (f"redis://user:p@{SECRET}@host", "@ too many.*%40"),
        (f"redis://user:p/{SECRET}@host", "@ too many.*%40"),
        (f"redis://user:p:{SECRET}@host", ": too many.*%3A"),
        (f"redis://user:p?{SECRET}@host", "parameter that is not known"),
        (f"redis://user:{SECRET}%@host", "%.*%25"),
        (f"redis://user:{SECRET}é@host", "percent-encoded"),
        (f"redis://user:{SECRET}@", "lacks a server"),
        (f"redis://user:{SECRET}@h:port", "port.*1 to 65535"),
        (f"redis://user:{SECRET}@h:65536", "port.*1 to 65535"),
        (f"redis://user:{SECRET}@h/x", "database"),
        (f"redis://user:{SECRET}@a,b", r"\+cluster or \+sentinel"),
        (f"redis://user:{SECRET}@::1", "IPv6"),
        (f"redis://user:{SECRET}@[::1", "IPv6"),
        (f"redis+cluster://user:{SECRET}@a/1", "only one"),
        (f"redis+sentinel://user:{SECRET}@a", "master"),
        (f"unix://user:{SECRET}@", "absolute path"),
        (f"unix://{SECRET}/s", "absolute path"),
        (f"redis://user:{SECRET}@h?timeout_m=1", "did you mean timeout_ms"),
        (f"redis://user:{SECRET}@h?timeout_ms=9", "10 to 600000"),
        (f"redis://user:{SECRET}@h?timeout_ms=10&timeout_ms=10", "twice"),
        (f"redis://user:{SECRET}@h?ssl_cert_reqs=maybe", "required, optional, none"),
        (f"mysql://user:{SECRET}@h", "begins with none of"),
    ],
)
def test_a_wrong_url_is_explained_without_showing_it(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_url(url)
    assert SECRET not in str(caught.value)
    assert "p@ss" not in str(caught.value)


def test_no_repr_shows_the_password() -> None:
    config = parse_url(f"redis://user:{SECRET}@h", SECRET)
    assert SECRET not in repr(config)
    assert SECRET not in repr(ValkeyStore(config))
    assert addresses(config) == [str(Address("h", 6379))]
