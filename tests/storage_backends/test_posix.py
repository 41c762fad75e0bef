"""What files add to the contract: odd roots, links, vanished mounts, hung calls, folder sizes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcm.core.errors import CorruptRecord, InvalidArgument, StorageError, Unsupported
from kvcm.core.limits import (
    BLOCKS_PER_EXTENT_MAX,
    ENTITY_NAME_BYTES_MAX,
    FILE_NAME_BYTES_MAX,
    KEYS_PER_FILE_MAX,
    NAMES_PER_JOB_MAX,
    STORAGE_ROOT_BYTES_MAX,
)
from kvcm.core.types import StorageConfig, StorageType
from kvcm.core.uri import parse_uri
from kvcm.storage_backends import posix_tree
from kvcm.storage_backends.base import DataStorageBackend, ExtentName, ProbeResult, SpecSlots
from kvcm.storage_backends.factory import validate_config
from kvcm.storage_backends.posix_names import (
    Layout,
    check_keys_per_file,
    check_root,
    check_storage_name,
    file_objects,
    spec_component,
)
from kvcm.storage_backends.threads import DaemonPool
from kvcm.testing.contracts.storage_backend import (
    CLUSTER,
    EXTENT,
    HOSTILE_NAMES,
    NEIGHBOUR,
    OTHER_INSTANCE,
)

Make = Callable[..., DataStorageBackend]
SPEC = SpecSlots("tp0", 8, 20)


def _objects(backend: DataStorageBackend, extent: ExtentName = EXTENT) -> list[str]:
    return [o.name for o in backend.objects(backend.place(extent, [SPEC]), extent, [SPEC])]


def _write(names: list[str]) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x" * 64)


@pytest.mark.parametrize(
    ("root", "word"),
    [
        ("", "absolute"),
        (None, "absolute"),
        (7, "absolute"),
        ("relative/x", "absolute"),
        ("/", "root of the file system"),
        ("//", "root of the file system"),
        ("/a/../b", "'..'"),
        ("/a/.", "'..'"),
        ("/a b", "escape"),
        ("/a\nb", "escape"),
        ("/a\n", "escape"),
        ("/a%2F", "escape"),
        ("/a?b", "escape"),
        ("/a#b", "escape"),
        ("/é", "escape"),
        ("/a\0", "escape"),
        ("/a\\b", "escape"),
    ],
)
def test_roots_that_uris_cannot_carry_are_refused_naming_the_field(root: Any, word: str) -> None:
    with pytest.raises(InvalidArgument, match=r"root_path") as caught:
        check_root("root_path", root)
    assert word in str(caught.value)


def test_plain_roots_stay_byte_for_byte(make_backend: Make) -> None:
    assert check_root("root_path", "/tmp/nfs/") == "/tmp/nfs"
    root = "/mnt/a.b_c-d~e/x=1,y;z@h:80/(p)+q!$&'*"
    backend = make_backend(root_path=f"/{root}//")
    uri = backend.uris(backend.place(EXTENT, [SPEC]), EXTENT, SPEC, 0, 1)[0]
    assert uri.startswith(f"file://store_01.a-b{root}/{CLUSTER}/")
    assert parse_uri(uri).path.startswith(f"{root}/{CLUSTER}/")


def test_limits_hold_at_n_and_n_plus_1() -> None:
    check_root("root_path", "/" + "r" * (STORAGE_ROOT_BYTES_MAX - 1))
    with pytest.raises(InvalidArgument, match="root_path"):
        check_root("root_path", "/" + "r" * STORAGE_ROOT_BYTES_MAX)
    check_storage_name("n" * ENTITY_NAME_BYTES_MAX)
    with pytest.raises(InvalidArgument, match="global_unique_name"):
        check_storage_name("n" * (ENTITY_NAME_BYTES_MAX + 1))
    assert check_keys_per_file({"key_count_per_file": KEYS_PER_FILE_MAX}) == KEYS_PER_FILE_MAX
    with pytest.raises(InvalidArgument, match="key_count_per_file"):
        check_keys_per_file({"key_count_per_file": KEYS_PER_FILE_MAX + 1})


@pytest.mark.parametrize(
    "spec",
    [
        {"key_count_per_file": -1},
        {"key_count_per_file": True},
        {"key_count_per_file": "8"},
        {"touch_file_when_create": 1},
        {"former_roots": "/a"},
        {"former_roots": ["a"]},
    ],
)
def test_wrong_spec_fields_are_named(make_backend: Make, spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(spec))):
        make_backend(**spec)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"mountpoint": "mnt"}, "mountpoint"),
        ({"mountpoint": ""}, "mountpoint"),
        ({"root_dir": "../x"}, "root_dir"),
        ({"root_dir": 5}, "root_dir"),
    ],
)
def test_wrong_hf3fs_fields_are_named(make_backend: Make, spec: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        make_backend(StorageType.HF3FS, **spec)


def test_hf3fs_may_lie_right_at_its_mountpoint(make_backend: Make, tmp_path: Path) -> None:
    for root_dir in ("", "/"):
        backend = make_backend(StorageType.HF3FS, root_dir=root_dir)
        assert _objects(backend)[0].startswith(f"{tmp_path}/{CLUSTER}/")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", "é", "a\n", "a@b", "a%41"])
def test_storage_names_must_be_uri_hosts(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="global_unique_name"):
        check_storage_name(name)


def test_spec_components_are_bounded_distinct_and_single_path_parts(make_backend: Make) -> None:
    components = [spec_component(name) for name in HOSTILE_NAMES]
    assert len(set(components)) == len(HOSTILE_NAMES)
    assert spec_component("tp0") == "tp0"
    assert spec_component("tp_0") == "tp_0"
    # A plain name that looks like the escaped form of another must not meet it.
    assert spec_component(spec_component("a/b")) != spec_component("a/b")
    backend = make_backend(key_count_per_file=1)
    specs = [SpecSlots(name, 8, 3) for name in HOSTILE_NAMES]
    specs.append(SpecSlots("z" * 256, 8, BLOCKS_PER_EXTENT_MAX))
    names = [o.name for o in backend.objects(backend.place(EXTENT, specs), EXTENT, specs)]
    assert max(len(os.path.basename(name)) for name in names) < FILE_NAME_BYTES_MAX
    assert all(os.path.normpath(name) == name and name.isascii() for name in names)
    assert {name.count("/") for name in names} == {names[0].count("/")}


def test_no_folder_takes_more_than_its_share_of_many_files(make_backend: Make) -> None:
    backend = make_backend(key_count_per_file=1)
    one_large = [SpecSlots(f"tp{i}", 8, 4_000) for i in range(5)]
    folders = Counter(
        os.path.dirname(o.name)
        for o in backend.objects(backend.place(EXTENT, one_large), EXTENT, one_large)
    )
    for i in range(20_000):
        extent = ExtentName(CLUSTER, EXTENT.instance_uid, f"{i:032x}")
        small = [SpecSlots("tp0", 8, 1)]
        (found,) = backend.objects(backend.place(extent, small), extent, small)
        folders[os.path.dirname(found.name)] += 1
    assert len(folders) == 256
    assert max(folders.values()) < 2 * 40_000 / 256


def test_two_clusters_on_one_mount_never_share_a_path(make_backend: Make) -> None:
    backend = make_backend()
    other = ExtentName("c1u5t3r9", EXTENT.instance_uid, EXTENT.extent)
    assert not set(_objects(backend)) & set(_objects(backend, other))


def test_addresses_follow_the_config_of_grant_time(make_backend: Make) -> None:
    before = make_backend(key_count_per_file=8)
    descriptor = before.place(EXTENT, [SPEC])
    after = make_backend(key_count_per_file=3, root_path="/elsewhere")
    assert after.place(EXTENT, [SPEC]) != descriptor
    assert after.objects(descriptor, EXTENT, [SPEC]) == before.objects(descriptor, EXTENT, [SPEC])
    assert after.uris(descriptor, EXTENT, SPEC, 3, 9) == before.uris(descriptor, EXTENT, SPEC, 3, 9)


@pytest.mark.parametrize("descriptor", [b"", b"\x00", b"\x02\x94", b"\x01", b"\x01\x94\xa1a"])
def test_descriptors_that_do_not_parse_are_corrupt_records(
    make_backend: Make, descriptor: bytes
) -> None:
    with pytest.raises(CorruptRecord):
        make_backend().uris(descriptor, EXTENT, SPEC, 0, 1)


def test_blkid_is_printed_only_where_blocks_share_a_file(make_backend: Make) -> None:
    single, shared = make_backend(key_count_per_file=1), make_backend(key_count_per_file=8)
    slots = [f"blkid={i % 8}&size=8" for i in range(9)]
    for backend, query in ((single, ["size=8"] * 9), (shared, slots)):
        uris = backend.uris(backend.place(EXTENT, [SPEC]), EXTENT, SPEC, 0, 9)
        assert [uri.partition("?")[2] for uri in uris] == query


async def test_delete_goes_to_a_former_root_only_when_it_is_listed(
    make_backend: Make, tmp_path: Path
) -> None:
    before = make_backend()
    await before.create()
    names = _objects(before)
    _write(names)
    moved = make_backend(root_path=f"{tmp_path}/new")
    await moved.create()
    await moved.open()
    for answer in await moved.delete(names):
        assert isinstance(answer, StorageError)
        assert f"{tmp_path}/root" in str(answer)
    assert all(map(os.path.exists, names))
    knows = make_backend(root_path=f"{tmp_path}/new", former_roots=[f"{tmp_path}/root/"])
    await knows.create()
    await knows.open()
    assert await knows.delete(names) == [None] * len(names)
    assert not any(map(os.path.exists, names))


async def test_delete_refuses_every_name_of_another_shape(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    good = _objects(backend)[0]
    _write([good])
    root, folder, file = f"{tmp_path}/root", os.path.dirname(good), os.path.basename(good)
    precious = tmp_path / "precious"
    precious.write_text("x")
    bad = [
        "",
        "/",
        root,
        folder,
        str(precious),
        f"{root}/../precious",
        f"{folder}/../../../../../precious",
        f"{folder}//{file}",
        f"{folder}/./{file}",
        f"{folder}/../{folder[-2:]}/{file}",
        f"{root}/{CLUSTER}/inst0uid/zz/{file}",
        f"{folder}/..",
        f"{folder}/{file}\n",
        f"{folder}/{file}\0",
        good.replace(CLUSTER, "C1"),
        os.path.relpath(good),
        f"{root}2{good.removeprefix(root)}",
    ]
    assert all(isinstance(answer, StorageError) for answer in await backend.delete(bad))
    assert os.path.exists(good)
    assert precious.exists()


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_a_planted_link_leads_nothing_out_of_the_tree(
    make_backend: Make, tmp_path: Path, level: int
) -> None:
    backend = make_backend(touch_file_when_create=True)
    await backend.create()
    await backend.open()
    names = _objects(backend)
    outside = Path(f"{tmp_path}/outside")
    parts = names[0].removeprefix(f"{tmp_path}/root/").split("/")
    target = outside.joinpath(*parts[level:])
    target.parent.mkdir(parents=True)
    target.write_text("precious")
    link = Path(f"{tmp_path}/root").joinpath(*parts[:level])
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    assert Path(names[0]).exists(), "the link resolves, so only the guard stands in between"
    (answer,) = await backend.delete(names[:1])
    assert isinstance(answer, StorageError)
    with pytest.raises(StorageError):
        await backend.exists(names[:1], [0])
    with pytest.raises(StorageError):
        await backend.touch([names[0], names[1]])
    if level < 3:
        for call in (backend.list_objects, backend.remove_instance, backend.prepare):
            with pytest.raises(StorageError):
                await call(*parts[:2])
    else:
        assert await backend.list_objects(*parts[:2]) == [names[1]]
        await backend.remove_instance(*parts[:2])
    assert target.read_text() == "precious"


async def test_deleting_a_linked_file_removes_the_link_alone(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    name = _objects(backend)[0]
    precious = tmp_path / "precious"
    precious.write_text("x")
    Path(name).parent.mkdir(parents=True)
    os.symlink(precious, name)
    assert await backend.exists([name], [0]) == [False]
    assert await backend.delete([name]) == [None]
    assert not os.path.lexists(name)
    assert precious.exists()


async def test_a_folder_in_place_of_a_file_is_an_error_at_its_position(make_backend: Make) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    names = _objects(backend)
    os.makedirs(names[0])
    _write(names[1:])
    answers = await backend.delete(names)
    assert isinstance(answers[0], StorageError)
    assert names[0] in str(answers[0])
    assert answers[1:] == [None] * (len(names) - 1)


async def test_strangers_in_the_tree_are_neither_listed_nor_removed(make_backend: Make) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    await backend.prepare(CLUSTER, EXTENT.instance_uid)
    instance = Path(_objects(backend)[0]).parents[1]
    strangers = [instance / "00" / "notes.txt", instance / "README", instance / "zz" / "x_y_0"]
    strangers[2].parent.mkdir()
    for stranger in strangers:
        stranger.write_text("x")
    assert await backend.list_objects(CLUSTER, EXTENT.instance_uid) == []
    await backend.remove_instance(CLUSTER, EXTENT.instance_uid)
    assert all(stranger.exists() for stranger in strangers)
    assert sorted(p.name for p in instance.iterdir()) == ["00", "README", "zz"]


async def test_prepare_makes_all_folders_and_remove_instance_takes_them(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    for extent in (EXTENT, OTHER_INSTANCE):
        await backend.prepare(CLUSTER, extent.instance_uid)
    for extent in (EXTENT, NEIGHBOUR):
        assert all(os.path.isdir(os.path.dirname(name)) for name in _objects(backend, extent))
    await backend.remove_instance(CLUSTER, EXTENT.instance_uid)
    cluster = tmp_path / "root" / CLUSTER
    assert [p.name for p in cluster.iterdir()] == [OTHER_INSTANCE.instance_uid]
    assert len(list((cluster / OTHER_INSTANCE.instance_uid).iterdir())) == 256


async def test_batches_of_several_jobs_answer_in_order(make_backend: Make) -> None:
    backend = make_backend(key_count_per_file=1)
    await backend.create()
    await backend.open()
    spec = SpecSlots("tp0", 8, 2 * NAMES_PER_JOB_MAX + 1)
    names = [o.name for o in backend.objects(backend.place(EXTENT, [spec]), EXTENT, [spec])]
    _write(names[::3])
    expected = [i % 3 == 0 for i in range(len(names))]
    assert await backend.exists(names, [64] * len(names)) == expected
    assert await backend.delete(names) == [None] * len(names)
    assert await backend.exists(names, [0] * len(names)) == [False] * len(names)


async def test_a_root_that_cannot_be_used_is_refused_with_its_path(
    make_backend: Make, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for root in (str(file), f"{file}/below", "/proc/kvcm", f"{tmp_path}/{'n' * 300}"):
        backend = make_backend(root_path=root)
        for call in (backend.create, backend.open):
            with pytest.raises(StorageError, match=root):
                await call()


async def test_open_probes_when_the_config_asks_for_it(
    make_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    backend = make_backend(check=False)
    await backend.create()
    monkeypatch.setattr(posix_tree.os, "fsync", broken)
    await backend.open()
    with pytest.raises(StorageError, match="Input/output error"):
        await make_backend(check=True).open()


async def test_a_mountpoint_that_is_not_there_is_refused_when_checked(
    make_backend: Make, tmp_path: Path
) -> None:
    mountpoint = f"{tmp_path}/unmounted"
    with pytest.raises(StorageError, match=mountpoint):
        await make_backend(StorageType.HF3FS, check=True, mountpoint=mountpoint).create()
    assert not os.path.exists(mountpoint)
    backend = make_backend(StorageType.HF3FS, mountpoint=mountpoint)
    await backend.create()
    await backend.open()


async def test_nothing_counts_as_gone_while_the_root_has_vanished(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend(touch_file_when_create=True)
    await backend.create()
    await backend.open()
    names = _objects(backend)
    shutil.rmtree(tmp_path / "root")
    result = await backend.probe()
    assert not result.available
    assert f"{tmp_path}/root" in result.detail
    assert all(isinstance(answer, StorageError) for answer in await backend.delete(names))
    with pytest.raises(StorageError):
        await backend.exists(names, [1] * len(names))
    for call in (backend.list_objects, backend.prepare, backend.remove_instance):
        with pytest.raises(StorageError):
            await call(CLUSTER, EXTENT.instance_uid)
    with pytest.raises(StorageError):
        await backend.touch(names)
    assert not os.path.exists(tmp_path / "root")


@pytest.mark.parametrize("kind", [StorageType.NFS, StorageType.HF3FS])
async def test_nothing_counts_as_gone_while_an_empty_folder_lies_in_place_of_the_mount(
    make_backend: Make, tmp_path: Path, kind: StorageType
) -> None:
    fields = {StorageType.NFS: "root_path", StorageType.HF3FS: "mountpoint"}
    root = tmp_path / "fs"
    made = make_backend(kind, touch_file_when_create=True, **{fields[kind]: str(root)})
    place = root / "kv" if kind is StorageType.HF3FS else root
    await made.create()
    await made.open()
    await made.prepare(CLUSTER, EXTENT.instance_uid)
    names = _objects(made)
    _write(names)
    root.rename(tmp_path / "away")
    place.mkdir(parents=True)
    result = await made.probe()
    assert not result.available
    assert f"{place}' has no file '.kvcm-storage'" in result.detail
    again = make_backend(kind, **{fields[kind]: str(root)})
    with pytest.raises(StorageError, match=r"create that file if this is the right place"):
        await again.open()
    for backend in (made, again):
        assert all(isinstance(answer, StorageError) for answer in await backend.delete(names))
        assert all(isinstance(found, StorageError) for found in await _all_else(backend, names))
    assert os.listdir(place) == []
    shutil.rmtree(root)
    (tmp_path / "away").rename(root)
    await again.open()
    for backend in (made, again):
        assert (await backend.probe()).available
        assert await backend.exists(names, [1] * len(names)) == [True] * len(names)
    assert await made.delete(names) == [None] * len(names)


async def _all_else(backend: DataStorageBackend, names: list[str]) -> list[Any]:
    """What is answered by all that looks into the root, or writes there, but for delete."""

    async def survey() -> None:
        async for _ in backend.survey(CLUSTER, EXTENT.instance_uid):
            pass

    calls = [
        backend.exists(names, [1] * len(names)),
        backend.list_objects(CLUSTER, EXTENT.instance_uid),
        backend.prepare(CLUSTER, EXTENT.instance_uid),
        backend.remove_instance(CLUSTER, EXTENT.instance_uid),
        backend.instances(CLUSTER),
        backend.leftovers(),
        backend.delete_leftovers([]),
        survey(),
    ]
    if backend.touched:
        calls.append(backend.touch(names))
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_files_of_a_cluster_whose_folder_is_gone_below_the_marker_are_gone(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    names = _objects(backend)
    _write(names)
    shutil.rmtree(tmp_path / "root" / CLUSTER)
    assert (await backend.probe()).available
    assert await backend.exists(names, [1] * len(names)) == [False] * len(names)
    assert await backend.delete(names) == [None] * len(names)


async def test_opening_makes_nothing_and_making_is_done_once(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend()
    root = tmp_path / "root"
    with pytest.raises(StorageError, match=f"{root}' is missing: is its file system mounted"):
        await backend.open()
    assert not root.exists()
    await backend.create()
    marker = root / posix_tree.MARKER
    assert json.loads(marker.read_text()) == {"kvcm": 1}
    before = marker.stat()
    await backend.create()
    assert marker.stat().st_ino == before.st_ino
    assert marker.stat().st_mtime_ns == before.st_mtime_ns
    marker.write_text("")
    await backend.open()
    assert (await backend.probe()).available


async def test_only_a_regular_file_marks_a_root(make_backend: Make, tmp_path: Path) -> None:
    backend = make_backend()
    root = tmp_path / "root"
    marker = root / posix_tree.MARKER
    root.mkdir()
    (tmp_path / "elsewhere").write_text("x")
    marker.symlink_to(tmp_path / "elsewhere")
    await backend.create()
    with pytest.raises(StorageError, match="has no file"):
        await backend.open()
    marker.unlink()
    marker.mkdir()
    await backend.create()
    with pytest.raises(StorageError, match="has no file"):
        await backend.open()
    marker.rmdir()
    marker.touch()
    await backend.open()


async def test_deletes_below_a_former_root_without_its_marker_are_errors(
    make_backend: Make, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    before = make_backend()
    await before.create()
    names = _objects(before)
    _write(names)
    backend = make_backend(root_path=f"{tmp_path}/new", former_roots=[str(root)])
    await backend.create()
    await backend.open()
    root.rename(tmp_path / "away")
    root.mkdir()
    for answer in await backend.delete(names):
        assert isinstance(answer, StorageError)
    assert await backend.instances(CLUSTER) == []
    assert (await backend.probe()).available
    root.rmdir()
    (tmp_path / "away").rename(root)
    assert await backend.instances(CLUSTER) == [EXTENT.instance_uid]
    assert await backend.delete(names) == [None] * len(names)


async def test_the_marker_is_never_listed_as_a_leftover_nor_deleted_as_one(
    make_backend: Make, tmp_path: Path
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    marker = tmp_path / "root" / posix_tree.MARKER
    assert await backend.leftovers() == []
    assert await backend.instances(CLUSTER) == []
    for call in (backend.delete_leftovers, backend.delete):
        (answer,) = await call([str(marker)])
        assert isinstance(answer, StorageError)
    assert marker.exists()


async def test_probe_leaves_nothing_behind_and_notices_other_bytes(
    make_backend: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    assert (await backend.probe()).available
    monkeypatch.setattr(posix_tree.os, "write", lambda fd, data: len(data))
    assert not (await backend.probe()).available
    assert os.listdir(tmp_path / "root") == [posix_tree.MARKER]


def test_r58_a_million_files_of_an_instance_leave_no_folder_with_10_000() -> None:
    """Most files, since each block has its own, and one-block extents beside long ones."""
    layout = Layout("file", "s", "/r", 1)
    names = [
        found.name
        for number, slots in enumerate([88] * 1_100 + [1] * 3_200)
        for found in file_objects(
            layout, ExtentName("c", "i", f"e{number}"), [SpecSlots("tp0", 8, slots)]
        )
    ]
    assert len(names) == len(set(names)) == 100_000
    folders = Counter(os.path.dirname(name) for name in names)
    assert max(folders.values()) < 500


async def test_a_probe_tells_what_is_free_for_users_without_privileges(
    make_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    await backend.create()
    await backend.open()
    space = SimpleNamespace(f_bavail=3, f_bfree=7, f_bsize=1 << 20, f_frsize=4096)
    monkeypatch.setattr(posix_tree.os, "fstatvfs", lambda fd: space)
    assert await backend.probe() == ProbeResult(True, free_bytes=3 * 4096)


async def test_nothing_blocking_works_before_open_or_after_close(make_backend: Make) -> None:
    backend = make_backend()
    names = _objects(backend)
    for _ in range(2):
        assert not (await backend.probe()).available
        assert all(isinstance(answer, StorageError) for answer in await backend.delete(names))
        with pytest.raises(StorageError):
            await backend.prepare(CLUSTER, EXTENT.instance_uid)
        await backend.create()
        await backend.open()
        await backend.close()


async def test_a_hung_mount_delays_neither_probe_callers_nor_close(
    make_backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    calls: list[str] = []

    def hang(root: str, name: str, content: bytes) -> None:
        calls.append(name)
        release.wait()

    backend = make_backend()
    await backend.create()
    await backend.open()
    monkeypatch.setattr(posix_tree, "probe_root", hang)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(backend.probe(), 0.01)
    assert len(calls) == 1, "one thread hangs, however often the mount is probed"
    waiting = asyncio.create_task(backend.probe())
    await asyncio.sleep(0)
    await backend.close()
    assert not (await asyncio.wait_for(waiting, 5)).available
    release.set()


async def test_a_pool_refuses_more_jobs_than_its_limit_and_runs_them_outside_the_loop() -> None:
    release = threading.Event()
    pool = DaemonPool("p", threads_max=1, jobs_max=2)
    first = asyncio.create_task(pool.run(release.wait))
    second = asyncio.create_task(pool.run(threading.current_thread))
    await asyncio.sleep(0)
    with pytest.raises(StorageError, match="limit 2"):
        await pool.run(release.wait)
    release.set()
    assert await first
    assert (await second).daemon
    assert await pool.run(lambda: 7) == 7
    with pytest.raises(KeyError):
        await pool.run(lambda: {}["x"])
    pool.close()
    pool.close()
    with pytest.raises(StorageError, match="closed"):
        await pool.run(release.wait)


async def test_a_cancelled_job_that_has_not_begun_never_runs() -> None:
    release, ran = threading.Event(), threading.Event()
    pool = DaemonPool("p", threads_max=1, jobs_max=9)
    first = asyncio.create_task(pool.run(release.wait))
    second = asyncio.create_task(pool.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    release.set()
    await first
    await pool.run(lambda: None)
    assert not ran.is_set()
    pool.close()


def test_the_factory_knows_the_types_it_does_not_build(make_backend: Make) -> None:
    types = {StorageType.UNSPECIFIED: "has no type", StorageType.TAIRMEMPOOL: "pace"}
    for kind, named in types.items():
        with pytest.raises(Unsupported, match=named):
            validate_config(StorageConfig(global_unique_name="s", type=kind))
    with pytest.raises(InvalidArgument, match="root_path"):
        validate_config(StorageConfig(global_unique_name="s", type=StorageType.NFS))
