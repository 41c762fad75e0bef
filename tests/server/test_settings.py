from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvcm.core import limits
from kvcm.core.errors import ConfigError
from kvcm.server.settings import known_keys, load, nearest, to_dict, to_toml, without_secrets


def refusal(flags: dict[str, object] | None = None, **kwargs: object) -> str:
    kwargs.setdefault("environ", {})
    with pytest.raises(ConfigError) as caught:
        load(flags, **kwargs)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvcm.toml"
    path.write_text(text)
    return path


def test_the_defaults_are_those_of_the_protocol() -> None:
    settings = load(environ={})
    assert settings.host == "127.0.0.1"
    ports = (settings.rpc_port, settings.http_port)
    assert ports == (6381, 6382)
    assert (settings.admin_rpc_port, settings.admin_http_port) == (6491, 6492)
    assert settings.receive_bytes_max == 64 << 20
    assert settings.cache.reply_bytes_max == 4 << 20
    assert settings.cache.grace_s_min == 10


def test_stores_live_in_the_data_directory_unless_told_otherwise() -> None:
    settings = load({"data_dir": "/d"}, environ={})
    assert settings.registry_url == "sqlite:////d/registry.db"
    assert settings.index_url == "rocksdb:/d/index"
    assert load({"index_url": "memory:"}, environ={}).index_url == "memory:"


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    config = toml(tmp_path, "rpc_port = 1\nhttp_port = 1001\nadmin_rpc_port = 1\n")
    environ = {"KVCM_RPC_PORT": "2", "KVCM_HTTP_PORT": "1002"}
    settings = load({"rpc_port": 3}, environ=environ, config=config)
    assert (settings.rpc_port, settings.http_port, settings.admin_rpc_port) == (3, 1002, 1)
    assert settings.admin_http_port == 6492


def test_sections_merge_key_by_key(tmp_path: Path) -> None:
    config = toml(tmp_path, "[cache]\nshards_max = 32\ngrace_s_min = 1\n")
    environ = {"KVCM_CACHE__GRACE_S_MIN": "2.5"}
    cache = load({"cache.write_timeout_s_default": 7}, environ=environ, config=config).cache
    assert (cache.shards_max, cache.grace_s_min, cache.write_timeout_s_default) == (32, 2.5, 7)


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    config = toml(tmp_path, 'host = "::1"')
    assert load(environ={"KVCM_CONFIG": str(config)}).host == "::1"


@pytest.mark.parametrize("key", list(known_keys()))
def test_every_key_has_an_environment_variable(key: str) -> None:
    variable = "KVCM_" + key.replace(".", "__").upper()
    value = str(to_dict(load(environ={})).get(key.split(".")[0]))
    try:
        load(environ={variable: value})
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
    assert "unknown" not in refused


def test_unknown_keys_are_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert refusal({"rpc_prt": 1}) == "unknown setting rpc_prt; did you mean rpc_port?"
    message = refusal(environ={"KVCM_CACHE__REPLY_BYTE_MAX": "1"})
    assert "KVCM_CACHE__REPLY_BYTE_MAX" in message
    assert "did you mean KVCM_CACHE__REPLY_BYTES_MAX?" in message
    message = refusal(config=toml(tmp_path, "[rocksdb]\nsink = true\n"))
    assert "rocksdb.sink in " in message
    assert "did you mean rocksdb.sync?" in message


def test_unlike_words_get_no_suggestion() -> None:
    assert nearest("zzzz", list(known_keys())) == ""


def test_variables_that_kubernetes_sets_for_a_service_named_kvcm_are_not_ours() -> None:
    environ = {
        "KVCM_SERVICE_HOST": "10.0.0.1",
        "KVCM_SERVICE_PORT": "6381",
        "KVCM_SERVICE_PORT_GRPC": "6381",
        "KVCM_PORT": "tcp://10.0.0.1:6381",
        "KVCM_PORT_6381_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=environ).rpc_port == 6381


@pytest.mark.parametrize(
    ("flags", "environ", "says"),
    [
        ({"rpc_port": "x"}, {}, "--rpc-port"),
        ({"rpc_port": 65536}, {}, "--rpc-port"),
        ({"rpc_port": -1}, {}, "--rpc-port"),
        ({}, {"KVCM_LOG_LEVEL": "loud"}, "KVCM_LOG_LEVEL"),
        ({"log_format": "xml"}, {}, "--log-format"),
        ({"index_url": "valkey://x:y"}, {}, "--index-url"),
        ({"index_url": "mysql://x"}, {}, "--index-url"),
        ({"index_url": "rocksdb:"}, {}, "--index-url"),
        ({"host": " "}, {}, "--host"),
        ({"drain_s": "nan"}, {}, "--drain-s"),
        ({"cache.shards_max": 8}, {}, "--set cache.shards_max"),
        ({"cache.shards_max": 48}, {}, "must be a power of two"),
        ({"receive_bytes_max": 1 << 31}, {}, "--receive-bytes-max"),
    ],
)
def test_wrong_values_name_key_and_source(
    flags: dict[str, object], environ: dict[str, str], says: str
) -> None:
    assert says in refusal(flags, environ=environ)


@pytest.mark.parametrize(
    ("key", "most", "more"),
    [
        ("cache.room_wait_s", limits.ROOM_WAIT_S_MAX, limits.ROOM_WAIT_S_MAX + 0.001),
        ("cache.shards_max", limits.SHARDS_MAX, 2 * limits.SHARDS_MAX),
        (
            "metrics.instances_max",
            limits.METRICS_INSTANCES_MAX,
            limits.METRICS_INSTANCES_MAX + 1,
        ),
        ("metrics.groups_max", limits.METRICS_GROUPS_MAX, limits.METRICS_GROUPS_MAX + 1),
        ("repair.scrub_per_second", limits.SCRUB_PER_SECOND_MAX, limits.SCRUB_PER_SECOND_MAX + 1),
    ],
)
def test_a_setting_may_be_at_its_limit_and_not_above(key: str, most: float, more: float) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load({key: most}, environ={}), section), name) == most
    assert key in refusal({key: more})


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(config=tmp_path / "none.toml")
    assert "not TOML" in refusal(config=toml(tmp_path, "a = = 1"))
    path = tmp_path / "latin.toml"
    path.write_bytes(b'host = "\xff"')
    assert "not UTF-8" in refusal(config=path)
    assert "rpc_port in " in refusal(config=toml(tmp_path, 'rpc_port = "x"'))


def test_two_listeners_never_share_a_port_but_both_grpc_ones() -> None:
    assert "http_port and admin_http_port" in refusal({"http_port": 5, "admin_http_port": 5})
    assert "rpc_port and http_port" in refusal({"rpc_port": 5, "http_port": 5})
    assert load({"rpc_port": 5, "admin_rpc_port": 5}, environ={}).admin_rpc_port == 5
    assert load({"http_port": 0, "admin_http_port": 0}, environ={}).http_port == 0


def test_the_level_may_be_written_in_capitals() -> None:
    assert load({"log_level": "WARNING"}, environ={}).log_level == "warning"


def test_brackets_around_an_ipv6_host_are_dropped() -> None:
    assert load({"host": "[::1]"}, environ={}).host == "::1"


def test_printed_settings_read_back_equal(tmp_path: Path) -> None:
    settings = load(
        {"bootstrap": '/a "b"\\c', "rocksdb.sync": "true", "data_dir": "/ä\x7f"}, environ={}
    )
    printed = to_toml(settings)
    assert load(environ={}, config=toml(tmp_path, printed)) == settings
    assert tomllib.loads(printed) == to_dict(settings)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@h/db", "postgresql://u:***@h/db"),
        (
            "postgresql+psycopg://u:a%40b@[::1]:5/db?x=1",
            "postgresql+psycopg://u:***@[::1]:5/db?x=1",
        ),
        ("postgresql://h/db?user=u&password=secret", "postgresql://h/db?user=u&password=***"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("sqlite:///kvcm-data/registry.db", "sqlite:///kvcm-data/registry.db"),
        ("rocksdb:/d/index", "rocksdb:/d/index"),
    ],
)
def test_passwords_in_urls_are_hidden(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_errors_never_show_the_value_given() -> None:
    assert "hunter2" not in refusal({"index_url": "valkey://u:hunter2@h#"})
