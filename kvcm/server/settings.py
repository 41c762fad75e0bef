"""The settings of a manager: one typed tree, from flags, environment, a TOML file and defaults.

Earlier sources win: flags, then ``KVCM_…`` variables (sections joined by ``__``, as in
``KVCM_CACHE__REPLY_BYTES_MAX``), then the TOML file, then the defaults below. Unknown keys are
errors everywhere.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from kvcm.core import limits
from kvcm.core.errors import ConfigError

ENV_PREFIX = "KVCM_"
CONFIG_VARIABLE = "KVCM_CONFIG"
HIDDEN = "***"

LogLevel = Literal["debug", "info", "warning", "error", "critical"]

# What Kubernetes puts into the environment of pods for a Service named "kvcm".
_SERVICE_LINK = re.compile(
    r"KVCM_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)\Z"
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class CacheOptions(_Section):
    """Limits of lookups and writes."""

    reply_bytes_max: int = Field(default=limits.REPLY_BYTES_DEFAULT, ge=1 << 16, le=1 << 30)
    """A prefix answer is cut here; a batch answer above it is refused."""
    read_cache_bytes: int = Field(default=512 << 20, ge=1 << 20)
    """Memory for records and encoded answers."""
    write_timeout_s_default: int = Field(default=limits.WRITE_TIMEOUT_S_DEFAULT, ge=1)
    write_timeout_s_max: int = Field(default=limits.WRITE_TIMEOUT_S_MAX, ge=1)
    grace_s_min: float = Field(default=limits.GRACE_S_MIN, ge=0, allow_inf_nan=False)
    """Bytes of a retired block stay readable at least this long."""
    room_wait_s: float = Field(
        default=limits.ROOM_WAIT_S_DEFAULT, ge=0, le=limits.ROOM_WAIT_S_MAX, allow_inf_nan=False
    )
    """How long a write that a limit cut waits for eviction to make room."""
    shards_max: int = Field(default=64, ge=limits.SHARDS_MIN, le=limits.SHARDS_MAX)
    """Upper bound of an instance's shards."""

    @field_validator("shards_max")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value


class RepairOptions(_Section):
    """The background repair."""

    scrub_per_second: int = Field(default=500, ge=0, le=limits.SCRUB_PER_SECOND_MAX)
    """Records and files that the scrubber looks at; 0 turns it off."""


class DeletingOptions(_Section):
    """How the bytes of retired blocks are deleted."""

    tries_max: int = Field(default=10, ge=1, le=1_000)
    """Failures in a row after which an object counts as a dead letter."""
    dead_letter_retry_s: float = Field(default=3_600.0, ge=1, le=604_800, allow_inf_nan=False)
    """How often dead letters are tried again."""
    calls_at_once: int = Field(default=8, ge=1, le=1_024)
    """Delete calls under way over all storages; one that takes long does not count."""
    calls_per_storage: int = Field(default=2, ge=1, le=64)
    """Delete calls under way on one storage."""


class CeilingOptions(_Section):
    """Hit rates beside the best possible ones."""

    enabled: bool = True
    """Count what is asked for, to tell the best possible hit rate and why the rest is missed."""


class TraceEventOptions(_Section):
    """What happens to blocks, recorded in files."""

    enabled: bool = False
    folder: Path | None = None
    """Default: ``events`` in the data directory."""
    sample: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    """Share of the instances that are recorded, by the hash of their ids."""
    file_bytes_max: int = Field(default=64 << 20, ge=1 << 16, le=1 << 40)
    """Compressed; a file that has so many is followed by a new one."""
    files_max: int = Field(default=16, ge=1, le=10_000)
    """The oldest ones beyond are removed."""


class AccessLogOptions(_Section):
    """A line for calls, in the log or a file."""

    rate: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Share of the calls that get a line; 0 = off."""
    slow_ms: float = Field(default=500.0, ge=0, allow_inf_nan=False)
    """Slower calls, and those that are refused or fail, always get one."""
    file: Path | None = None
    """Default: the log on standard error."""


class MetricsOptions(_Section):
    """What ``/metrics`` and GetMetrics tell."""

    enabled: bool = True
    """Count blocks and time the index store; calls, space and storages are told in any case."""
    instances_max: int = Field(default=50, ge=0, le=limits.METRICS_INSTANCES_MAX)
    """Instances with series of their own: those with most traffic."""
    groups_max: int = Field(default=100, ge=0, le=limits.METRICS_GROUPS_MAX)
    """Groups with series of their own."""
    silent_after_s: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """An instance without lookups and writes for so long is silent."""


class RocksDbOptions(_Section):
    """The embedded index store."""

    sync: bool = False
    """fsync every commit. Off: nothing is lost when the process dies; a power loss may take
    the commits of the last moments."""
    cache_bytes: int = Field(default=64 << 20, ge=0)
    """RocksDB's block cache."""


class Settings(_Section):
    """Everything that can be set. Ports of 0 mean any free port."""

    host: str = "127.0.0.1"
    rpc_port: int = Field(default=6381, ge=0, le=65535)
    http_port: int = Field(default=6382, ge=0, le=65535)
    admin_rpc_port: int = Field(default=6491, ge=0, le=65535)
    admin_http_port: int = Field(default=6492, ge=0, le=65535)
    data_dir: Path = Path("kvcm-data")
    registry_url: str = ""
    """``sqlite:///PATH`` or ``postgresql://USER@HOST/DATABASE``; default: SQLite in the data
    directory."""
    registry_password: SecretStr = SecretStr("")
    """Of a registry_url without one."""
    registry_password_file: Path | None = None
    """A file that holds it, for instance a mounted secret."""
    registry_wait_s: float = Field(default=60.0, ge=0, le=86_400, allow_inf_nan=False)
    """How long a start waits for a registry database that is away before it gives up."""
    registry_auto_migrate: bool | None = None
    """Bring an older registry schema up to date at start. Default: SQLite only."""
    index_url: str = ""
    """``rocksdb:PATH``, ``memory:`` or a URL of Valkey, as ``valkey://HOST:6379``,
    ``valkey+cluster://…``, ``valkey+sentinel://…``, ``unix://…``; default: RocksDB in the data
    directory."""
    index_password: SecretStr = SecretStr("")
    """Of an index_url without one."""
    index_password_file: Path | None = None
    """A file that holds it, for instance a mounted secret."""
    bootstrap: Path | None = None
    """Storages and groups to create when the registry is empty."""
    log_level: LogLevel = "info"
    log_format: Literal["text", "json"] = "text"
    receive_bytes_max: int = Field(
        default=limits.RECEIVE_BYTES_DEFAULT, ge=1 << 16, le=(1 << 31) - 1
    )
    """Largest request on either transport."""
    drain_s: float = Field(default=10.0, ge=0, le=3_600, allow_inf_nan=False)
    """How long a stopping manager waits for calls under way."""
    probe_period_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """How often storages are probed and failed ones opened again."""
    probe_timeout_s: float = Field(
        default=limits.PROBE_TIMEOUT_S_DEFAULT, gt=0, allow_inf_nan=False
    )
    """A probe of a storage that takes longer counts as hung: the storage is unavailable."""
    cache: CacheOptions = CacheOptions()
    deleting: DeletingOptions = DeletingOptions()
    repair: RepairOptions = RepairOptions()
    metrics: MetricsOptions = MetricsOptions()
    ceiling: CeilingOptions = CeilingOptions()
    rocksdb: RocksDbOptions = RocksDbOptions()
    access_log: AccessLogOptions = AccessLogOptions()
    trace_events: TraceEventOptions = TraceEventOptions()

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        data_dir = given.get("data_dir") or cls.model_fields["data_dir"].default
        derived = {
            "registry_url": f"sqlite:///{data_dir}/registry.db",
            "index_url": f"rocksdb:{data_dir}/index",
        }
        return given | {key: value for key, value in derived.items() if not given.get(key)}

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        host = value.strip().removeprefix("[").removesuffix("]")
        if not host:
            raise ValueError("is empty")
        return host

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("index_url")
    @classmethod
    def _known_index(cls, value: str) -> str:
        scheme, _, path = value.partition(":")
        if scheme == "memory" or (scheme == "rocksdb" and path):
            return value
        if scheme in ("rocksdb", "memory") or "://" not in value:
            raise ValueError("is neither rocksdb:PATH nor memory: nor a URL of Valkey")
        # Imported here: only a manager on Valkey needs its library.
        from kvcm.metaindex.stores.valkey_url import parse_url

        try:
            parse_url(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _one_password(self) -> Settings:
        if self.registry_password.get_secret_value() and self.registry_password_file:
            raise ValueError("registry_password and registry_password_file are both set")
        if self.index_password.get_secret_value() and self.index_password_file:
            raise ValueError("index_password and index_password_file are both set")
        return self

    @model_validator(mode="after")
    def _ports_apart(self) -> Settings:
        if self.http_port and self.http_port == self.admin_http_port:
            raise ValueError(
                f"http_port and admin_http_port are both {self.http_port}; the two share method "
                "names, so each needs its own port (0 takes a free one)"
            )
        named = {
            name: getattr(self, name)
            for name in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
        }
        for rpc in ("rpc_port", "admin_rpc_port"):
            for http in ("http_port", "admin_http_port"):
                if named[rpc] and named[rpc] == named[http]:
                    raise ValueError(f"{rpc} and {http} are both {named[rpc]}")
        return self


class Layer(NamedTuple):
    """One source: how it names a key to the user, and its values."""

    spell: Callable[[str], str]
    values: dict[str, Any]


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> Settings:
    """The effective settings.

    Args:
        flags: dotted key → value, as given on the command line; None values count as absent.
        environ: the environment; ``KVCM_CONFIG`` names the file when ``config`` is None.

    Raises:
        ConfigError: one line that names the key, its source, and the nearest known key when the
            key is unknown.
    """
    environ = os.environ if environ is None else environ
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    layers = [
        *([_file_layer(config)] if config else []),
        _env_layer(environ),
        _flag_layer(flags or {}),
    ]
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer.values)
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, layers)) from None


def known_keys(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings that hold a value."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from known_keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def nearest(word: str, known: list[str]) -> str:
    """`` (did you mean …?)`` for a misspelt word, or nothing."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def to_dict(settings: Settings) -> dict[str, Any]:
    """Plain values with passwords hidden."""
    values: dict[str, Any] = json.loads(settings.model_dump_json(exclude_none=True))
    for key in ("registry_url", "index_url"):
        values[key] = without_secrets(values[key])
    for key in ("registry_password", "index_password"):
        if values.pop(key):
            values[key] = HIDDEN
    return values


def to_toml(settings: Settings) -> str:
    """A TOML document that ``--config`` reads back (but for hidden passwords)."""
    values = to_dict(settings)
    lines = [f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for section, entries in values.items():
        if isinstance(entries, dict):
            lines += ["", f"[{section}]", *(f"{k} = {_toml(v)}" for k, v in entries.items())]
    return "\n".join(lines) + "\n"


_USER_INFO = re.compile(r"\A([\w+.-]+://[^:/@?]*):.*@")
_SECRET_PARAM = re.compile(r"((?:password|passwd|pwd|token|secret)[^=&]*)=[^&]*", re.IGNORECASE)


def without_secrets(url: str) -> str:
    """The URL with its password, and parameters that look like one, hidden."""
    # Up to the last @: a password that is not percent-encoded may hold any of /, ? and @.
    hidden = _USER_INFO.sub(rf"\1:{HIDDEN}@", url)
    base, mark, query = hidden.partition("?")
    return base + mark + _SECRET_PARAM.sub(rf"\1={HIDDEN}", query)


def _toml(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = _copy(value)


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


def _nest(dotted: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        node = tree
        *sections, last = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def _flag_layer(flags: Mapping[str, Any]) -> Layer:
    known = list(known_keys())
    given = {key: value for key, value in flags.items() if value is not None}
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown setting {key}{nearest(key, known)}")
    return Layer(_flag, _nest(given))


def _env_layer(environ: Mapping[str, str]) -> Layer:
    known = {_variable(key): key for key in known_keys()}
    values: dict[str, str] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or name == CONFIG_VARIABLE or _SERVICE_LINK.match(name):
            continue
        key = known.get(name.upper())
        if key is None:
            raise ConfigError(
                f"unknown environment variable {name}{nearest(name.upper(), list(known))}"
            )
        values[key] = value
    return Layer(_variable, _nest(values))


def _file_layer(path: Path) -> Layer:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return Layer(lambda key: f"{key} in {path}", values)


def _flag(key: str) -> str:
    return f"--set {key}" if "." in key else "--" + key.replace("_", "-")


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper()


def _explain(error: ValidationError, layers: list[Layer]) -> str:
    known = list(known_keys())
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_input=False):
        key = ".".join(str(part) for part in problem["loc"])
        if not key:
            lines.append(_plain(problem["msg"]))
            continue
        spelt = _spelling(key, layers)
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown setting {spelt}{nearest(key, known)}")
        else:
            lines.append(f"{spelt}: {_plain(problem['msg'])}")
    return "; ".join(lines)


def _plain(message: str) -> str:
    text = message.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _spelling(key: str, layers: list[Layer]) -> str:
    for layer in layers[::-1]:
        if _holds(layer.values, key.split(".")):
            return layer.spell(key)
    return key


def _holds(values: Mapping[str, Any], path: list[str]) -> bool:
    node: Any = values
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True
