"""kvcm admin against a real manager: what people see, what scripts get, what goes wrong."""

import json
import math
import stat

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.cli.admin_common import entity, parse_bytes, plain
from kvcm.cli.admin_usage import _row
from kvcm.cli.group_flags import GroupFlags
from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import InstanceGroup
from kvcm.registry.defaults import default_group


def test_a_storage_from_add_to_remove(kvcm, tmp_path):
    name, root = "life", f"{tmp_path}/life/"
    kvcm.ok("admin", "storage", "add", name, "--spec", f"root_path={root}")
    listed = {s["global_unique_name"]: s for s in kvcm.json("admin", "storage", "list")}
    assert listed[name]["type"] == "file"
    assert listed[name]["spec"]["root_path"] == root
    assert root in kvcm.ok("admin", "storage", "list")

    kvcm.ok("admin", "storage", "update", name, "-s", "key_count_per_file=4")
    listed = {s["global_unique_name"]: s for s in kvcm.json("admin", "storage", "list")}
    assert listed[name]["spec"]["key_count_per_file"] == 4
    assert listed[name]["spec"]["root_path"] == root

    kvcm.ok("admin", "storage", "update", name, "--capacity", "4GB", "--watermark", "0.9")
    listed = {s["global_unique_name"]: s for s in kvcm.json("admin", "storage", "list")}
    assert listed[name]["capacity_bytes"] == 4 * 10**9
    assert listed[name]["high_percentage"] == 0.9
    assert listed[name]["spec"]["key_count_per_file"] == 4

    kvcm.ok("admin", "storage", "disable", name)
    kvcm.ok("admin", "storage", "enable", name)
    kvcm.ok("admin", "storage", "remove", name, "--yes")
    assert name not in {s["global_unique_name"] for s in kvcm.json("admin", "storage", "list")}


def test_a_listed_storage_can_be_added_again_from_its_json(kvcm, tmp_path):
    kvcm.ok("admin", "storage", "add", "copy", "-s", f"root_path={tmp_path}/c/")
    (entry,) = (
        s for s in kvcm.json("admin", "storage", "list") if s["global_unique_name"] == "copy"
    )
    kvcm.ok("admin", "storage", "remove", "copy", "--yes")
    file = tmp_path / "s.json"
    file.write_text(json.dumps(entry))
    kvcm.ok("admin", "storage", "add", "--file", file)
    assert entry in kvcm.json("admin", "storage", "list")
    kvcm.ok("admin", "storage", "remove", "copy", "--yes")


def test_a_vcns_hf3fs_storage_is_added_by_every_way_and_serves(kvcm, manager, tmp_path):
    mountpoint = f"mountpoint={tmp_path}"
    kvcm.ok(
        "admin", "storage", "add", "vcns_1", "--type", "vcns_hf3fs", "--check",
        "-s", mountpoint, "-s", "root_dir=/one", "-s", "remote_host=vcns", "-s", "remote_port=9000",
    )  # fmt: skip
    spec = {"mountpoint": str(tmp_path), "root_dir": "/two", "meta_storage_uri": "x://y"}
    body = {"storage": {"global_unique_name": "vcns_2", "vcnsthreefs": spec}}
    url = f"http://{manager.host}:{manager.admin_http_port}/api/addStorage"
    answer = httpx.post(url, json=body, trust_env=False).json()
    assert answer["header"]["status"]["code"] == "OK", answer
    shown = {s["global_unique_name"]: s for s in kvcm.json("admin", "storage", "list")}
    assert shown["vcns_1"]["type"] == shown["vcns_2"]["type"] == "vcns_hf3fs"
    assert (shown["vcns_1"]["spec"]["remote_port"], shown["vcns_1"]["health"]) == (
        9000,
        "available",
    )
    assert shown["vcns_2"]["spec"]["meta_storage_uri"] == "x://y"

    # What is written there is read back, by the path in the URI.
    kvcm.ok("admin", "group", "create", "vcns", "--candidate", "vcns_1", "--capacity", "1MB")
    with Client(manager.target) as client:
        known = client.register_instance("vcns", "vcns-model", 16, {"tp0": 8})
        assert known.storage_configs[0].storage_spec["remote_host"] == "vcns"
        with client.write("vcns-model", [1, 2]) as session:
            assert not session.put(FileSdk(), [b"block-01", b"block-02"])
        uris = list(client.get_cache_location("vcns-model", [1, 2]).locations.uris("tp0"))
        assert all(uri.startswith(f"vcns_hf3fs://vcns_1{tmp_path}/one/") for uri in uris)
        assert FileSdk().get_many([(uri, None) for uri in uris]) == [b"block-01", b"block-02"]
    kvcm.ok("admin", "instance", "remove", "vcns-model", "--yes")
    kvcm.ok("admin", "group", "remove", "vcns", "--yes")
    kvcm.ok("admin", "storage", "remove", "vcns_2", "--yes")
    kvcm.ok("admin", "storage", "remove", "vcns_1", "--yes", "--force")


def test_storage_mistakes_are_named(kvcm, tmp_path):
    assert "nobody" in kvcm.fails("admin", "storage", "enable", "nobody")
    assert "nobody" in kvcm.fails("admin", "storage", "update", "nobody")
    assert "floppy" in kvcm.fails("admin", "storage", "add", "x", "--type", "floppy")
    assert "colour" in kvcm.fails("admin", "storage", "add", "x", "-s", "colour=red")
    assert "NAME=VALUE" in kvcm.fails("admin", "storage", "add", "x", "-s", "root_path")
    assert "twice" in kvcm.fails("admin", "storage", "add", "x", "-s", "a=1", "-s", "a=2")
    assert "master_service_entry" in kvcm.fails(
        "admin", "storage", "add", "x", "--type", "mooncake"
    )
    assert "nfs_01" in kvcm.fails(
        "admin", "storage", "add", "nfs_01", "-s", f"root_path={tmp_path}"
    )
    file = tmp_path / "bad.json"
    file.write_text('{"global_unique_name": "x", "type": "file", "sepc": {}}')
    assert "sepc" in kvcm.fails("admin", "storage", "add", "-f", file)
    file.write_text("[]")
    assert "object" in kvcm.fails("admin", "storage", "add", "-f", file)


def test_a_group_from_create_to_remove(kvcm):
    kvcm.ok(
        "admin", "group", "create", "team", "--candidate", "nfs_01", "--capacity", "5GB",
        "--type-capacity", "file=2GiB", "--max-instances", "3", "--max-keys", "1000",
        "--watermark", "0.7", "--delete-delay-ms", "2000", "--strategy", "CPS_PREFER_3FS",
    )  # fmt: skip
    group = kvcm.json("admin", "group", "show", "team")
    assert group["storage_candidates"] == ["nfs_01"]
    assert group["quota"]["capacity"] == 5_000_000_000
    (by_type,) = group["quota"]["quota_config"]
    assert (by_type["storage_type"], by_type["capacity"]) == ("ST_NFS", 2 * 2**30)
    assert group["cache_config"]["data_storage_strategy"] == "CPS_PREFER_3FS"
    assert group["cache_config"]["meta_indexer_config"]["max_key_count"] == 1000
    assert "5 GB" in kvcm.ok("admin", "group", "show", "team")

    kvcm.ok("admin", "group", "update", "team", "--capacity", "6GB", "--watermark", "0.5",
            "--low-watermark", "0.4", "--ttl", "60", "--ttl-since", "TTL_SINCE_FINISH",
            "--admission", "ADMISSION_TINYLFU", "--reclaim-step", "1GB")  # fmt: skip
    reclaim = kvcm.json("admin", "group", "show", "team")["cache_config"]["reclaim_strategy"]
    assert (reclaim["low_percentage"], reclaim["ttl_seconds"]) == (0.4, 60)
    assert (reclaim["ttl_since"], reclaim["admission"]) == ("TTL_SINCE_FINISH", "ADMISSION_TINYLFU")
    assert reclaim["reclaim_step_size"] == 10**9
    assert "ADMISSION_TINYLFU" in kvcm.ok("admin", "group", "show", "team")
    changed = kvcm.json("admin", "group", "show", "team")
    assert changed["quota"]["capacity"] == 6_000_000_000
    reclaim = changed["cache_config"]["reclaim_strategy"]
    assert reclaim["trigger_strategy"]["used_percentage"] == 0.5
    assert changed["version"] > group["version"]
    assert changed["max_instance_count"] == 3, "what was not named stays"

    assert {"default", "team"} <= {g["name"] for g in kvcm.json("admin", "group", "list")}
    assert "team" in kvcm.ok("admin", "group", "list")
    kvcm.ok("admin", "group", "remove", "team", "--yes")
    assert "team" in kvcm.fails("admin", "group", "show", "team")


def test_a_shown_group_creates_another_from_its_json(kvcm, tmp_path):
    shown = kvcm.json("admin", "group", "show", "default")
    file = tmp_path / "g.json"
    file.write_text(json.dumps(shown))
    kvcm.ok("admin", "group", "create", "twin", "-f", file)
    assert kvcm.json("admin", "group", "show", "twin") == shown | {"name": "twin"}
    kvcm.ok("admin", "group", "update", "twin", "-f", file)
    kvcm.ok("admin", "group", "remove", "twin", "-y")


def test_group_mistakes_are_named(kvcm, tmp_path):
    file = tmp_path / "g.json"
    file.write_text('{"name": "x", "quta": {}}')
    assert "quta" in kvcm.fails("admin", "group", "create", "-f", file)
    file.write_text('{"name": "x", "quota": {"capacity": "much"}}')
    assert "quota.capacity" in kvcm.fails("admin", "group", "create", "-f", file)
    assert "lots" in kvcm.fails("admin", "group", "create", "x", "--capacity", "lots")
    assert "CPS_MAYBE" in kvcm.fails("admin", "group", "create", "x", "--strategy", "CPS_MAYBE")
    assert "default" in kvcm.fails("admin", "group", "create", "default")
    assert "name" in kvcm.fails("admin", "group", "create")


def test_an_instance_from_register_to_remove(kvcm):
    kvcm.ok(
        "admin", "instance", "register", "llama", "--block-size", "16", "-s", "tp0=4KiB",
        "-s", "tp1=4096", "--model", "llama-8b", "--spec-group", "all=tp0,tp1",
    )  # fmt: skip
    shown = kvcm.json("admin", "instance", "show", "llama")
    assert shown["location_spec_infos"] == [
        {"name": "tp0", "size": 4096},
        {"name": "tp1", "size": 4096},
    ]
    assert shown["model_deployment"]["model_name"] == "llama-8b"
    assert "llama-8b" in kvcm.ok("admin", "instance", "list", "--group", "default")
    assert "'nobody' does not exist" in kvcm.fails("admin", "instance", "list", "--group", "nobody")

    assert "block_size" in kvcm.fails(
        "admin", "instance", "register", "llama", "--block-size", "32", "-s", "tp0=4096"
    )
    kvcm.ok("admin", "instance", "remove", "llama", "--yes")
    assert "llama" in kvcm.fails("admin", "instance", "show", "llama")


@pytest.fixture
def blocks(kvcm, manager):
    """Instance ``inspect`` with keys -1 and 7 serving, 64 bytes each."""
    with Client(manager.target, timeout=10) as client:
        client.register_instance("default", "inspect", 16, {"tp0": 64})
        with client.write("inspect", [-1, 7]) as session:
            session.put(FileSdk(), [{"tp0": b"x" * 64}, {"tp0": b"y" * 64}])
    yield "inspect"
    kvcm("admin", "instance", "remove", "inspect", "--yes")


def test_blocks_are_inspected_removed_and_trimmed(kvcm, blocks):
    found = kvcm.json("admin", "cache", "inspect", blocks, "-1", "7", "8")
    assert [f["key"] for f in found] == [-1, 7, 8]
    assert [f["meta"]["status"] for f in found] == ["CLS_SERVING"] * 2 + ["CLS_NOT_FOUND"]
    assert found[0]["location"]["tp0"].startswith("file://nfs_01/")
    assert found[2]["location"] == {}
    assert "CLS_SERVING" in kvcm.ok("admin", "cache", "inspect", blocks, "-1")

    usage = kvcm.json("admin", "usage")
    assert usage["instances"][blocks]["serving_blocks"] == 2
    assert usage["groups"]["default"]["limit"]["high"] == 24 * 10**9
    assert usage["groups"]["default"]["next_eviction"]["instances"].keys() == {blocks}
    table = kvcm.ok("admin", "usage")
    assert blocks in table
    assert "22.4 GiB to 21.0 GiB" in table
    assert "default on file" in table

    kvcm.ok("admin", "cache", "remove", blocks, "-1", "--yes")
    states = [f["meta"]["status"] for f in kvcm.json("admin", "cache", "inspect", blocks, -1, 7)]
    assert states == ["CLS_NOT_FOUND", "CLS_SERVING"]
    kvcm.ok("admin", "cache", "trim", blocks, "--from", "1", "--to", "2", "--yes")
    assert kvcm.json("admin", "cache", "inspect", blocks, 7)[0]["meta"]["status"] == "CLS_SERVING"
    kvcm.ok("admin", "cache", "trim", blocks, "--yes")
    assert kvcm.json("admin", "cache", "inspect", blocks, 7)[0]["meta"]["status"] == (
        "CLS_NOT_FOUND"
    )


def test_cache_mistakes_are_named(kvcm):
    assert "nobody" in kvcm.fails("admin", "cache", "inspect", "nobody", "1")
    assert "'x'" in kvcm.fails("admin", "cache", "inspect", "i", "x")
    assert "int64" in kvcm.fails("admin", "cache", "inspect", "i", 2**63)
    assert "go together" in kvcm.fails("admin", "cache", "trim", "i", "--from", "1", "--yes")
    assert "--meta-only" in kvcm.fails(
        "admin", "cache", "trim", "i", "--from", "1", "--to", "2", "--meta-only", "--yes"
    )


def test_a_snapshot_restores_what_was_changed_since(kvcm, tmp_path):
    file = tmp_path / "snapshot.json"
    kvcm.ok("admin", "snapshot", "export", "-o", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(kvcm.ok("admin", "snapshot", "export")) == json.loads(file.read_text())
    kvcm.ok("admin", "group", "create", "later")
    kvcm.ok("admin", "snapshot", "import", file, "--yes")
    assert "later" in kvcm.fails("admin", "group", "show", "later")
    file.write_text("{")
    assert "JSON" in kvcm.fails("admin", "snapshot", "import", file, "--yes")
    assert "nowhere" in kvcm.fails("admin", "snapshot", "import", tmp_path / "nowhere", "--yes")


def test_an_account_is_added_listed_and_deleted(kvcm):
    kvcm.ok("admin", "account", "add", "eve", "--role", "admin", "--password-stdin", stdin="s3cr\n")
    assert {"user_name": "eve", "role": "admin"} in kvcm.json("admin", "account", "list")
    assert "s3cr" not in kvcm.ok("admin", "account", "list")
    assert "eve" in kvcm.fails(
        "admin", "account", "add", "eve", "--password-stdin", stdin="other\n"
    )
    kvcm.ok("admin", "account", "delete", "eve", "--yes")
    assert kvcm.json("admin", "account", "list") == []
    assert "--password-stdin" in kvcm.fails("admin", "account", "add", "eve")


def test_what_destroys_asks_first_and_without_a_terminal_refuses(kvcm):
    kvcm.ok("admin", "group", "create", "kept")
    for arguments in (
        ("admin", "group", "remove", "kept"),
        ("admin", "storage", "remove", "nfs_01"),
        ("admin", "instance", "remove", "x"),
        ("admin", "cache", "remove", "x", "1"),
        ("admin", "cache", "trim", "x"),
        ("admin", "account", "delete", "x"),
    ):
        assert "--yes" in kvcm.fails(*arguments, stdin="y\n")
    assert kvcm.json("admin", "group", "show", "kept")["name"] == "kept"
    kvcm.ok("admin", "group", "remove", "kept", "--yes")


def test_health_metrics_and_log_level(kvcm):
    health = kvcm.json("admin", "health")
    assert health["is_health"] is True
    assert health["is_leader"] is True
    assert "healthy" in kvcm.ok("admin", "health")
    found = kvcm.json("admin", "metrics", "service.query_counter")
    assert {m["name"] for m in found["metrics"]} == {"service.query_counter"}
    assert any(m["tags"].get("api_name") == "CheckHealth" for m in found["metrics"])
    assert "query_counter" in kvcm.ok("admin", "metrics", "query_counter")
    kvcm.ok("admin", "logger", "warning", "kvcm.cache")
    assert "loud" in kvcm.fails("admin", "logger", "loud")


def test_the_admin_commands_work_over_http_too(kvcm, manager):
    address = f"http://{manager.host}:{manager.admin_http_port}"
    output = kvcm("admin", "group", "show", "default", "--json", "--target", address)
    assert json.loads(output.stdout) == kvcm.json("admin", "group", "show", "default")


@pytest.mark.parametrize(
    "arguments",
    [
        ("admin", "group", "list", "--target", "127.0.0.1:9"),
        ("admin", "storage", "list", "--target", "http://127.0.0.1:9"),
        ("admin", "usage", "--http", "http://127.0.0.1:9"),
        ("admin", "usage", "--http", "nonsense"),
        ("admin", "group", "list", "--target", "ftp://x"),
    ],
)
def test_no_manager_at_the_address_is_one_line(arguments):
    from typer.testing import CliRunner

    from kvcm.cli.main import build_app

    result = CliRunner().invoke(build_app(), list(arguments))
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (4095, "4,095 B"), (4096, "4 KiB"), (30 * 10**9, "30 GB"),
        (3 * 2**29, "1,536 MiB"), (10**15, "1 PB"), (10**18, "1,000 PB"),
    ],
)  # fmt: skip
def test_a_size_somebody_set_is_shown_to_the_byte(count, text):
    from kvcm.cli.output import exact_bytes

    assert exact_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("4096", 4096), ("10GB", 10**10), ("10 gb", 10**10), ("1.5GiB", 3 * 2**29),
        ("2K", 2000), ("1KiB", 1024), ("0.5K", 500), ("3PB", 3 * 10**15),
    ],
)  # fmt: skip
def test_sizes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "GB", "1.2.3G", "1e9", "0.5", "1XB", "nan", "1 G B"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidArgument, match=r"size|whole"):
        parse_bytes(text)


def test_the_largest_size_is_that_of_int64():
    assert parse_bytes(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(InvalidArgument, match="above the largest size"):
        parse_bytes(str(2**63))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["watermark", "low_watermark"])
def test_a_mark_that_is_no_finite_number_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgument, match=r"_percentage is (nan|inf), must be a finite"):
        GroupFlags(**{name: value}).apply({})


def test_an_eviction_that_has_nothing_to_take_is_shown_as_nothing():
    ahead = {"planned": 500_000, "bytes": 0, "complete": False, "instances": {}}
    entry = {"limit": {"unit": "bytes", "capacity": 10**7}, "next_eviction": ahead}
    assert _row("group", entry)[-2] == "nothing"
    ahead["instances"] = {"llama": 2048}
    assert _row("group", entry)[-2] == "488.3 KiB: llama 2.0 KiB"


@given(st.integers(0, 2**62))
def test_every_whole_number_of_bytes_is_read_exactly(count):
    assert parse_bytes(str(count)) == count


def test_a_group_survives_the_way_to_json_and_back():
    group = default_group()
    again = entity(InstanceGroup, json.loads(json.dumps(plain(group))), "group")
    assert again == group
