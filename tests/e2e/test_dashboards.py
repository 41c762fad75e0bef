"""Dashboards and alerts against a real manager and, where there is one, a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from e2e_harness import PATIENCE_S, STORAGE, Site
from prometheus_client.parser import text_string_to_metric_families

from kvcm.testing.eventually import eventually_sync

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = ROOT / "deploy/prometheus/kvcm.rules.yml"
RULE_CASES = Path(__file__).with_name("alert_cases.yml")
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
CHOICES = {"$__rate_interval": "20s", "$group": "roomy", "$storage": ".*", "$manager": ".*"}
BLOCK_BYTES = 10


class Query(NamedTuple):
    """An expression of a panel, and its unit."""

    where: str
    expression: str
    unit: str


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield path.stem, panel


def chosen(expression: str) -> str:
    """With the values that Grafana would put in."""
    for name, value in CHOICES.items():
        expression = expression.replace(name, value)
    return expression


QUERIES = [
    Query(
        f"{page}: {panel['title']}",
        chosen(target["expr"]),
        panel["fieldConfig"]["defaults"]["unit"],
    )
    for page, panel in panels()
    for target in panel["targets"]
]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bkvcm_\w+", expression))


# ---- a manager, with something of everything -----------------------------------------------------


def group(name: str, capacity: int) -> dict[str, Any]:
    strategy = {"trigger_strategy": {"used_percentage": 0.8}}
    return {
        "name": name,
        "storage_candidates": [STORAGE],
        "quota": {"capacity": capacity},
        "cache_config": {"reclaim_strategy": strategy},
    }


class Traffic:
    """A manager, and calls of every outcome."""

    def __init__(self, folder: Path) -> None:
        root = folder / "blocks"
        storage = {"global_unique_name": STORAGE, "nfs": {"root_path": str(root)}}
        groups = [group("roomy", 1 << 20), group("full", BLOCK_BYTES - 1)]
        document = {"storages": [storage], "instance_groups": groups}
        self.site = Site(folder, root=root, document=document)
        self.site.start()
        self.http = httpx.Client(timeout=PATIENCE_S)
        self.next_key = 1

    def post(self, method: str, **body: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.site.ready['http_port']}/api/{method}"
        answer: dict[str, Any] = self.http.post(url, json={"trace_id": "t", **body}).json()
        return answer

    def go(self) -> None:
        """Blocks are looked up, written and looked up again; a full group refuses some."""
        keys = list(range(self.next_key, self.next_key + 4))
        self.next_key += len(keys)
        for name in ("roomy", "full"):
            self.post(
                "registerInstance",
                instance_group=name,
                instance_id=name,
                block_size=4,
                location_spec_infos=[{"name": "tp0", "size": BLOCK_BYTES}],
            )
            self.look_up(name, keys)
            begun = self.post("startWriteCache", instance_id=name, block_keys=keys)
            if session := begun.get("write_session_id"):
                self.post(
                    "finishWriteCache",
                    instance_id=name,
                    write_session_id=session,
                    success_blocks={"offset": len(keys)},
                )
            self.look_up(name, keys)

    def look_up(self, name: str, keys: list[int]) -> None:
        self.post(
            "getCacheLocation", instance_id=name, query_type="QT_PREFIX_MATCH", block_keys=keys
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.site.ready['admin_http_port']}"

    def exported(self) -> set[str]:
        """Names that a query may use: of samples, also of kinds of which there are none yet."""
        families = text_string_to_metric_families(
            self.http.get(f"http://{self.address}/metrics").text
        )
        found: set[str] = set()
        for family in families:
            ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
            found |= {family.name + end for end in ends.get(family.type, [""])}
        return found

    def close(self) -> None:
        self.http.close()
        self.site.kill()


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traffic]:
    made = Traffic(tmp_path_factory.mktemp("dashboards"))
    try:
        made.go()
        yield made
    finally:
        made.close()


# ---- the files -----------------------------------------------------------------------------------


def test_the_dashboards_are_what_the_tool_makes() -> None:
    tool = [sys.executable, str(ROOT / "tools/check_dashboards.py")]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_dashboard_for_each_purpose_and_grafana_finds_it() -> None:
    assert [path.stem for path in DASHBOARDS] == ["fleet", "group", "manager", "storage"]
    (provider,) = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/dashboards/kvcm.yml").read_text()
    )["providers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mount = f"./deploy/grafana/dashboards:{provider['options']['path']}:ro"
    assert mount in compose["services"]["grafana"]["volumes"]


def test_prometheus_loads_the_alerts() -> None:
    (loaded,) = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())["rule_files"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mount = f"./deploy/prometheus/{RULES.name}:{loaded}:ro"
    assert mount in compose["services"]["prometheus"]["volumes"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_its_section_of_the_operations_page(alert: dict[str, Any]) -> None:
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^### (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor == alert["alert"].lower()
    assert headings.count(alert["alert"]) == 1


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_the_unit_is_that_of_the_metric(query: Query) -> None:
    """A share of two has the unit of neither."""
    ends = {"bytes": "_bytes", "s": "_seconds"}
    if end := ends.get(query.unit):
        assert any(end in name for name in names(query.expression))
    elif query.unit != "percentunit" and "_count" not in query.expression:
        assert not any(re.search(r"_bytes\b|_seconds", name) for name in names(query.expression))


# ---- a real manager ------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_metrics_of_a_manager_are_asked_for(traffic: Traffic) -> None:
    exported = traffic.exported()
    unknown = {
        where: missing
        for where, expression in [
            *((query.where, query.expression) for query in QUERIES),
            *((alert["alert"], alert["expr"]) for alert in ALERTS),
        ]
        if (missing := names(expression) - exported) or not names(expression)
    }
    assert not unknown


def test_the_choices_of_the_dashboards_are_labels_of_metrics(traffic: Traffic) -> None:
    page = traffic.http.get(f"http://{traffic.address}/metrics").text
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", str(variable["query"]))
            if variable["type"] == "query":
                assert found, variable
                # `instance` is put on by Prometheus.
                label = "" if found[2] == "instance" else f"[{{,]{found[2]}="
                assert re.search(rf"^{found[1]}{{.*?{label}|^{found[1]}{label}", page, re.MULTILINE)


# ---- promtool and Prometheus ---------------------------------------------------------------------


def program(name: str) -> str:
    found = shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed (Debian's package prometheus has it)")
    return found


def test_promtool_accepts_the_alerts() -> None:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(RULES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_each_alert_fires_for_its_condition_and_not_without() -> None:
    """The cases are series, minute by minute, and what must fire when."""
    cases = yaml.safe_load(RULE_CASES.read_text())["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    for silent in (True, False):
        covered = {c["alertname"] for c in checks if bool(c.get("exp_alerts")) is not silent}
        assert covered == {alert["alert"] for alert in ALERTS}
    done = subprocess.run(
        [program("promtool"), "test", "rules", RULE_CASES.name],
        cwd=RULE_CASES.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes ``target`` twice a second."""
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvcm", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "log"
    options = ["--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", *options],
            stdout=out,
            stderr=out,
        )
    try:
        listening = re.compile(r'"Listening on" address=(\S+)')
        found = eventually_sync(lambda: listening.search(log.read_text()), timeout=PATIENCE_S)
        assert found
        with httpx.Client(base_url=f"http://{found[1]}", timeout=PATIENCE_S) as client:
            eventually_sync(
                lambda: client.get("/-/ready").status_code == 200, timeout=PATIENCE_S, interval=0.1
            )
            yield client
    finally:
        process.terminate()
        process.wait()


def asked(client: httpx.Client, expression: str) -> list[float]:
    """The values of an instant query."""
    answer = client.post("/api/v1/query", data={"query": expression}).json()
    if answer["status"] != "success":
        raise ValueError(f"{expression}: {answer['error']}")
    return [float(sample["value"][1]) for sample in answer["data"]["result"]]


def all_have_data(client: httpx.Client, traffic: Traffic) -> Callable[[], bool]:
    def probe() -> bool:
        traffic.go()
        missing = [query.where for query in QUERIES if not asked(client, query.expression)]
        assert not missing, missing
        return True

    return probe


def rules_work(client: httpx.Client) -> Callable[[], bool]:
    def probe() -> bool:
        rules = client.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        healthy = dict.fromkeys((alert["alert"] for alert in ALERTS), "ok")
        assert {rule["name"]: rule["health"] for rule in rules} == healthy
        # What the traffic causes. A busy machine may cause another: lag.
        active = {rule["name"] for rule in rules if rule["state"] != "inactive"}
        assert active - {"KvcmEventLoopLag"} == {"KvcmWritesRefused"}
        return True

    return probe


@pytest.mark.slow
def test_every_panel_has_data_in_a_real_prometheus(traffic: Traffic, tmp_path: Path) -> None:
    with prometheus(tmp_path, traffic.address) as client:
        eventually_sync(all_have_data(client, traffic), timeout=PATIENCE_S, interval=0.5)
        for query in QUERIES:
            if query.unit == "percentunit":
                assert all(0 <= value <= 1.001 for value in asked(client, query.expression)), query
        for alert in ALERTS:
            asked(client, alert["expr"])
        eventually_sync(rules_work(client), timeout=PATIENCE_S, interval=0.5)
