"""Faults that users of systems like this one have met (field cases B R22, F R57, F R61)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from e2e_harness import PATIENCE_S, Site, environment, make_trace, result

from kvcm.client import AdminClient
from kvcm.client.file_sdk import FileSdk
from kvcm.client.keys import block_keys
from kvcm.core.errors import InvalidArgument, KvcmError, SessionNotExist, StorageError
from kvcm.core.limits import SPEC_SIZE_BYTES_MAX
from kvcm.core.storage import MARKER
from kvcm.core.types import StorageConfig, StorageType
from kvcm.optimizer.workload import WorkloadKind
from kvcm.testing.eventually import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# An engine: looks its prompt up, reads the hits, writes the rest; prints what it did.
ENGINE = """
import json, sys
from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk
from kvcm.client.keys import block_keys

target, salt = sys.argv[1:]
keys = block_keys(range(64), 4, salt=salt, extra={"lora": "a", "image": "b"})
data = [key.to_bytes(8, "big", signed=True) * 4 for key in keys]
with Client(target, timeout=60) as client:
    client.register_instance("default", "i", 4, {"tp0": 32})
    found = client.get_cache_location("i", keys)
    uris = found.locations.uris("tp0")
    right = FileSdk().get_many([(uri, None) for uri in uris]) == data[: len(uris)]
    with client.write("i", keys) as session:
        assert not session.put(FileSdk(), data)
        written = len(session)
print(json.dumps({"keys": keys, "hits": len(uris), "right": right, "written": written}))
"""

# A writer that has written half of its blocks, says so, and goes no further.
HALF_WRITER = """
import signal, sys
from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk

with Client(sys.argv[1], timeout=60) as client:
    grant = client.start_write_cache("i", range(20))
    uris = grant.locations.uris("tp0")
    assert not any(FileSdk().put_many([(uri, b"x" * 32) for uri in uris[:10]]))
    print(grant.session_id, flush=True)
    signal.pause()
"""

# 10,000 files to write and to read with 64 descriptors.
GREEDY = """
import resource, sys
from pathlib import Path
from kvcm.client.file_sdk import FileSdk

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = [open("/dev/null") for _ in range(int(sys.argv[2]))]
uris = [f"file://s{sys.argv[1]}/{n % 100}/{n}?size=4" for n in range(10_000)]
put = FileSdk().put_many([(uri, b"data") for uri in uris])
got = FileSdk().get_many([(uri, None) for uri in uris])
print(sum(e is None for e in put), sum(d == b"data" for d in got), len(put), len(got))
print({type(e).__name__ for e in put if e is not None})
"""


def engine(code: str, *arguments: object, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(**env),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_r22_engines_with_different_hash_seeds_share_their_cache(site: Site) -> None:
    site.start()
    first = json.loads(engine(ENGINE, site.target, "", PYTHONHASHSEED="1"))
    assert (first["hits"], first["written"]) == (0, 16)
    second = json.loads(engine(ENGINE, site.target, "", PYTHONHASHSEED="4242"))
    assert second["keys"] == first["keys"]
    assert (second["hits"], second["right"], second["written"]) == (16, True, 0)
    assert first["keys"] == block_keys(range(64), 4, extra=[("image", "b"), ("lora", "a")]), (
        "the order of extra keys does not matter"
    )
    other = json.loads(engine(ENGINE, site.target, "tenant", PYTHONHASHSEED="1"))
    assert (other["hits"], other["written"]) == (0, 16)


def test_r57_a_writer_killed_half_way_is_never_a_hit_and_its_keys_are_free(site: Site) -> None:
    site.start()
    with site.client() as client:
        client.register_instance("default", "i", 4, {"tp0": 32})
        writer = subprocess.Popen(
            [sys.executable, "-c", HALF_WRITER, site.target],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        try:
            assert writer.stdout is not None
            session = writer.stdout.readline().strip()
        finally:
            writer.kill()
            writer.communicate()
        assert session
        assert client.get_cache_location("i", range(20)).hits == 0
        first_files = files_below(site.root)
        assert first_files

        def granted_again() -> Sequence[str]:
            grant = client.start_write_cache("i", range(20))
            uris = grant.locations.uris("tp0")
            if uris:
                items = [(uri, b"y" * 32) for uri in uris]
                assert FileSdk().put_many(items) == [None] * 20
            client.finish_write_cache("i", grant.session_id, len(uris))
            return uris

        uris = eventually_sync(granted_again, timeout=PATIENCE_S, interval=0.2)
        assert len(uris) == 20
        with pytest.raises(SessionNotExist):
            client.finish_write_cache("i", session, 10)
        assert not {Path(uri.partition("?")[0].removeprefix("file://files")) for uri in uris} & {
            Path(p) for p in first_files
        }, "a second session never gets the paths of the first"
        assert FileSdk().get_many([(u, None) for u in uris]) == [b"y" * 32] * 20
    report = site.audit_at_rest()
    assert report.problems == []
    assert report.serving_blocks == 20
    assert not files_below(site.root) & first_files


def test_r57_a_truncated_file_reads_as_an_error_never_as_other_bytes(
    site: Site, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    make_trace(trace, WorkloadKind.CHAT, 40, 57)
    common = ("--instance", "i", "--block-bytes", 4096, trace)
    site.start()
    whole = result(site.replay(*common))["blocks"]
    for path in files_below(site.root):
        with Path(path).open("r+b") as file:
            file.truncate(file.seek(0, 2) * 5 // 8)
    with site.client() as client:
        keys = [int(k) for k in json.loads(trace.read_text().splitlines()[0])["hash_ids"]]
        uris = client.get_cache_location("i", keys).locations.uris("tp0")
        answers = FileSdk().get_many([(uri, None) for uri in uris])
        assert any(isinstance(answer, StorageError) for answer in answers)
    after = result(site.replay(*common))["blocks"]
    assert after["wrong"] == 0
    assert after["lost"] > 0
    assert after["hit"] < whole["asked"]
    # What could not be read was reported, and written again.
    healed = result(site.replay(*common))["blocks"]
    assert (healed["wrong"], healed["lost"], healed["hit"]) == (0, 0, whole["asked"])
    for path in files_below(site.root):
        Path(path).write_bytes(b"")
    assert site.stop() == 0
    missing = site.audit().missing
    assert missing
    assert all("bytes" in what or "is not there" in what for what in missing)
    site.start()
    empty = result(site.replay(*common))["blocks"]
    assert empty["wrong"] == 0
    assert empty["lost"] > 0


def test_r61_a_spec_size_that_cannot_be_is_refused_by_name(site: Site) -> None:
    site.start()
    url = f"http://127.0.0.1:{site.ready['http_port']}/api/registerInstance"
    with site.client() as client:
        for size in (0, -1, (1 << 63) - 1, SPEC_SIZE_BYTES_MAX + 1):
            with pytest.raises(InvalidArgument, match="size"):
                client.register_instance("default", "i", 4, {"tp0": 64, "tp1": size})
            body = {
                "instance_group": "default",
                "instance_id": "i",
                "block_size": 4,
                "location_spec_infos": [{"name": "tp0", "size": str(size)}],
            }
            status = httpx.post(url, json=body, timeout=PATIENCE_S).json()["header"]["status"]
            assert status["code"] == "INVALID_ARGUMENT"
            assert "size" in status["message"]
        client.register_instance("default", "i", 4, {"tp0": SPEC_SIZE_BYTES_MAX})


def test_r61_a_missing_root_is_made_or_the_storage_refused_by_its_path(
    site: Site, tmp_path: Path
) -> None:
    site.start()
    (tmp_path / "file").write_text("")
    with AdminClient(f"grpc://127.0.0.1:{site.ready['admin_rpc_port']}", timeout=60) as admin:

        def add(name: str, root: Path) -> None:
            admin.add_storage(
                StorageConfig(
                    global_unique_name=name,
                    type=StorageType.HF3FS,
                    spec={"mountpoint": str(tmp_path), "root_dir": str(root)},
                )
            )

        add("made", Path("a/b/c"))
        assert (tmp_path / "a/b/c").is_dir()
        with pytest.raises(KvcmError, match=str(tmp_path / "file")):
            add("refused", Path("file/b"))
        assert [s.global_unique_name for s in admin.list_storage()] == ["files", "made"]


@pytest.mark.parametrize("held", [0, 61], ids=["some left", "none left"])
def test_r61_10_000_files_under_a_low_descriptor_limit_are_errors_at_worst(
    tmp_path: Path, held: int
) -> None:
    counts, kinds = engine(GREEDY, tmp_path, held).splitlines()
    written, read, *lengths = map(int, counts.split())
    assert lengths == [10_000, 10_000]
    assert (written, read) == ((10_000, 10_000) if not held else (0, 0))
    assert kinds == ("set()" if not held else "{'StorageError'}")


def files_below(root: Path) -> set[str]:
    """Block files: the storage's marker is none."""
    return {str(p) for p in root.rglob("*") if p.is_file() and p.name != MARKER}
