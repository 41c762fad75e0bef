"""A manager that is started while the file system of its storage is not there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_harness import PATIENCE_S, QUICK, Site

from kvcm.client import AdminClient, Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.errors import NoStorage
from kvcm.core.storage import MARKER
from kvcm.testing.eventually import eventually_sync
from kvcm.testing.mounts import private_mounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PERIOD_S = 0.2
SETTINGS = (*QUICK, f"probe_period_s={PERIOD_S}")
BLOCK_BYTES = 32
KEPT, REMOVED = range(20), range(100, 110)


@dataclass(frozen=True)
class Place:
    """A site whose storage's file system comes and goes. ``seen``: where this process finds it."""

    site: Site
    seen: Path
    take_away: Callable[[], object]
    bring_back: Callable[[], object]


@contextmanager
def swapped(folder: Path) -> Iterator[Place]:
    """An empty folder stands in for the mount point."""
    site, away = Site(folder), folder / "away"

    def take_away() -> None:
        site.root.rename(away)
        site.root.mkdir()

    def bring_back() -> None:
        site.root.rmdir()
        away.rename(site.root)

    try:
        yield Place(site, site.root, take_away, bring_back)
    finally:
        site.kill()


@contextmanager
def mounted(folder: Path) -> Iterator[Place]:
    """The storage's root is a mount point."""
    with private_mounts() as mounts:
        disk, root = folder / "disk", folder / "blocks"
        mounts.tmpfs(disk, 1 << 22)
        mounts.bind(disk, root)
        site = Site(folder, root=root, inside=mounts.inside)
        try:
            yield Place(
                site,
                mounts.seen(root),
                lambda: mounts.unmount(root),
                lambda: mounts.bind(disk, root),
            )
        finally:
            site.kill()


@pytest.mark.parametrize("made", [swapped, mounted])
def test_nothing_is_lost_by_a_start_without_the_mount_and_all_is_back_with_it(
    made: Callable[[Path], AbstractContextManager[Place]], tmp_path: Path
) -> None:
    with made(tmp_path) as place:
        site = place.site
        site.start(settings=SETTINGS)
        with site.client() as client:
            client.register_instance("default", "i", 4, {"tp0": BLOCK_BYTES})
            for keys in (KEPT, REMOVED):
                write(place, client, keys)
        assert site.stop() == 0
        held = files_below(place.seen)

        place.take_away()
        site.start(settings=SETTINGS)
        with site.client() as client:
            assert client.get_cache_location("i", KEPT).hits == 0
            assert "has no file '.kvcm-storage': is its file system mounted?" in reason(site)
            client.remove_cache("i", REMOVED)
            client.register_instance("default", "new", 4, {"tp0": BLOCK_BYTES})
            with pytest.raises(NoStorage):
                client.start_write_cache("new", range(10))
            until = time.monotonic() + 4 * PERIOD_S
            while time.monotonic() < until:
                assert client.get_cache_location("i", KEPT).hits == 0
                assert os.listdir(place.seen) == []
            usage = site.usage()
            assert usage["serving_blocks"] == len(KEPT)
            assert usage["trash_bytes"] == len(REMOVED) * BLOCK_BYTES

            place.bring_back()
            assert files_below(place.seen) == held
            eventually_sync(
                lambda: client.get_cache_location("i", KEPT).hits == len(KEPT), timeout=PATIENCE_S
            )
            assert reason(site) == ""
            uris = client.get_cache_location("i", KEPT).locations.uris("tp0")
            assert FileSdk().get_many([(at(place, uri), None) for uri in uris]) == bytes_of(KEPT)
            # What was removed meanwhile is deleted now.
            eventually_sync(lambda: site.usage()["trash_bytes"] == 0, timeout=PATIENCE_S)
            write(place, client, REMOVED)


def write(place: Place, client: Client, keys: range) -> None:
    grant = client.start_write_cache("i", keys)
    items = zip(grant.locations.uris("tp0"), bytes_of(keys), strict=True)
    assert set(FileSdk().put_many([(at(place, uri), data) for uri, data in items])) == {None}
    client.finish_write_cache("i", grant.session_id, len(keys))


def bytes_of(keys: range) -> list[bytes]:
    return [bytes([key]) * BLOCK_BYTES for key in keys]


def at(place: Place, uri: str) -> str:
    """A location as this process, which sees other mounts, finds it."""
    return uri.replace(str(place.site.root), str(place.seen), 1)


def files_below(root: Path) -> set[str]:
    found = {str(path) for path in root.rglob("*") if path.is_file()}
    assert f"{root}/{MARKER}" in found
    return found


def reason(site: Site) -> str:
    with AdminClient(f"grpc://127.0.0.1:{site.ready['admin_rpc_port']}") as admin:
        (storage,) = admin.list_storage()
        return storage.unavailable_reason
