"""What every DataStorageBackend must do. Subclass and give ``backend`` as a fixture::

    class TestMine(StorageBackendContract):
        @pytest.fixture
        async def backend(self): ...

        def sdk(self): ...

It is opened, and empty each time. ``sdk`` moves blocks as clients do; where its URIs are files,
nothing is to be given. See docs/plugins.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvcm.client.file_sdk import FileSdk
from kvcm.client.transfer import MISSING, TRUNCATED, TransferSdk
from kvcm.core.errors import InvalidArgument, StorageError, Unsupported
from kvcm.core.uri import parse_uri
from kvcm.storage_backends.base import Capability, DataStorageBackend, ExtentName, SpecSlots

CLUSTER = "c1u5t3r0"
EXTENT = ExtentName(CLUSTER, "inst0uid", "e" * 32)
NEIGHBOUR = ExtentName(CLUSTER, "inst0uid", "f" * 32)
OTHER_INSTANCE = ExtentName(CLUSTER, "inst1uid", "e" * 32)
SPECS = (SpecSlots("tp0", 64, 21), SpecSlots("tp1", 32, 7))
HOSTILE_NAMES = (
    "../../etc",
    "..",
    ".",
    "/",
    "a/b",
    "a b",
    "a%2Fb",
    "a?b#c&d=e",
    "line\nbreak",
    "\0",
    "名" * 85,
    "x" * 256,
    "x" * 255 + "y",
    "tp0",
    "TP0",
    "tp_0",
    "tp.0",
    "tp-0",
)


class StorageBackendContract:
    """Holds for each backend; effects are observed through the bytes that clients move."""

    def sdk(self) -> TransferSdk:
        """What clients write and read blocks with; asked for again and again."""
        return FileSdk()

    async def write_block(self, uri: str, data: bytes) -> None:
        """Write a block as a client does."""
        (answer,) = await self.sdk().put_many_async([(uri, data)])
        if answer is not None:
            raise answer

    async def read_block(self, uri: str) -> bytes | None:
        """Read a block as a client does; None when it is gone."""
        (answer,) = await self.sdk().get_many_async([(uri, None)])
        if isinstance(answer, Exception):
            assert getattr(answer, "reason", "") in (MISSING, TRUNCATED), answer
            return None
        return answer

    async def delete(
        self, backend: DataStorageBackend, names: Sequence[str]
    ) -> list[Exception | None]:
        """Free objects; where readers' leases refuse it for a while, until they do not."""
        return await backend.delete(names)

    async def _fill(self, backend: DataStorageBackend, extent: ExtentName) -> list[str]:
        descriptor = backend.place(extent, SPECS)
        uris = [
            (spec, uri)
            for spec in SPECS
            for uri in backend.uris(descriptor, extent, spec, 0, spec.slots)
        ]
        for spec, uri in uris:
            await self.write_block(uri, _content(uri, spec.size))
        return [uri for _, uri in uris]

    def _names(self, backend: DataStorageBackend, extent: ExtentName) -> list[str]:
        return [o.name for o in backend.objects(backend.place(extent, SPECS), extent, SPECS)]

    async def test_uris_name_the_storage_its_type_and_the_slot_size(
        self, backend: DataStorageBackend
    ) -> None:
        descriptor = backend.place(EXTENT, SPECS)
        for uri in backend.uris(descriptor, EXTENT, SPECS[0], 0, 21):
            parsed = parse_uri(uri)
            assert parsed.scheme == backend.config.type_name
            assert parsed.storage == backend.config.global_unique_name
            assert parsed.size == 64
            assert list(parsed.params) == sorted(parsed.params)

    async def test_addresses_are_unique_over_extents_specs_and_slots(
        self, backend: DataStorageBackend
    ) -> None:
        seen: set[tuple[str, int]] = set()
        total = 0
        other_cluster = EXTENT.__class__("c1u5t3r1", EXTENT.instance_uid, EXTENT.extent)
        for extent in (EXTENT, NEIGHBOUR, OTHER_INSTANCE, other_cluster):
            descriptor = backend.place(extent, SPECS)
            for spec in SPECS:
                for uri in backend.uris(descriptor, extent, spec, 0, spec.slots):
                    parsed = parse_uri(uri)
                    seen.add((parsed.path + parsed.params.get("key", ""), parsed.offset))
                    total += 1
        assert len(seen) == total

    async def test_a_slice_of_uris_equals_the_slice_of_all(
        self, backend: DataStorageBackend
    ) -> None:
        descriptor = backend.place(EXTENT, SPECS)
        everything = backend.uris(descriptor, EXTENT, SPECS[0], 0, 21)
        for first in range(22):
            for count in range(22 - first):
                part = backend.uris(descriptor, EXTENT, SPECS[0], first, count)
                assert part == everything[first : first + count]

    async def test_every_slot_lies_in_exactly_one_object_and_sizes_add_up(
        self, backend: DataStorageBackend
    ) -> None:
        objects = backend.objects(backend.place(EXTENT, SPECS), EXTENT, SPECS)
        assert len({o.name for o in objects}) == len(objects)
        slots = [(o.spec, slot) for o in objects for slot in range(o.first, o.first + o.count)]
        assert sorted(slots) == [(i, s) for i, spec in enumerate(SPECS) for s in range(spec.slots)]
        for found in objects:
            assert found.size == found.count * SPECS[found.spec].size

    async def test_objects_of_every_owner_are_alike_but_for_their_names(
        self, backend: DataStorageBackend
    ) -> None:
        descriptor = backend.place(EXTENT, SPECS)
        other = ExtentName(EXTENT.cluster_uid, "other", "another")
        ours, theirs = (backend.objects(descriptor, e, SPECS) for e in (EXTENT, other))
        assert [o.name for o in ours] != [o.name for o in theirs]
        assert [replace(o, name="") for o in ours] == [replace(o, name="") for o in theirs]

    async def test_placement_is_pure_and_small(self, backend: DataStorageBackend) -> None:
        specs = [SpecSlots("x" * 256, 1 << 40, 65_535)] * 64
        descriptor = backend.place(EXTENT, specs)
        assert descriptor == backend.place(EXTENT, specs)
        assert len(descriptor) < 1024

    @pytest.mark.parametrize("bad", ["", "..", "a/b", "A", "a" * 33, "a\n", "é"])
    async def test_ids_that_are_no_tokens_are_refused(
        self, backend: DataStorageBackend, bad: str
    ) -> None:
        for extent in (
            ExtentName(bad, "i", "e"),
            ExtentName("c", bad, "e"),
            ExtentName("c", "i", bad),
        ):
            with pytest.raises(InvalidArgument):
                backend.place(extent, SPECS)
        with pytest.raises(InvalidArgument):
            await backend.prepare(CLUSTER, bad)
        with pytest.raises(InvalidArgument):
            await backend.remove_instance(CLUSTER, bad)

    async def test_hostile_spec_names_keep_apart_and_are_readable_again(
        self, backend: DataStorageBackend
    ) -> None:
        specs = [SpecSlots(name, 16, 2) for name in HOSTILE_NAMES]
        descriptor = backend.place(EXTENT, specs)
        uris = [uri for s in specs for uri in backend.uris(descriptor, EXTENT, s, 0, 2)]
        for uri in uris:
            await self.write_block(uri, _content(uri, 16))
        assert [await self.read_block(uri) for uri in uris] == [_content(uri, 16) for uri in uris]
        names = [o.name for o in backend.objects(descriptor, EXTENT, specs)]
        assert await self.delete(backend, names) == [None] * len(names)
        assert [await self.read_block(uri) for uri in uris] == [None] * len(uris)

    async def test_deleting_one_object_leaves_its_neighbours(
        self, backend: DataStorageBackend
    ) -> None:
        uris = await self._fill(backend, EXTENT)
        others = await self._fill(backend, NEIGHBOUR)
        victim = backend.objects(backend.place(EXTENT, SPECS), EXTENT, SPECS)[0]
        assert await self.delete(backend, [victim.name]) == [None]
        lost = range(victim.first, victim.first + victim.count)
        for slot, uri in enumerate(uris):
            found = await self.read_block(uri)
            if slot in lost:
                assert found is None
            else:
                assert found is not None
        for uri in others:
            assert await self.read_block(uri) is not None

    async def test_delete_answers_position_by_position_and_can_be_repeated(
        self, backend: DataStorageBackend
    ) -> None:
        await self._fill(backend, EXTENT)
        names = self._names(backend, EXTENT)
        batch = [names[0], "not ours", *names[1:], names[0]]
        for _ in range(2):
            answers = await self.delete(backend, batch)
            assert isinstance(answers[1], StorageError)
            assert answers[:1] + answers[2:] == [None] * (len(batch) - 1)
        assert await self.delete(backend, []) == []

    async def test_probe_finds_an_opened_storage_available(
        self, backend: DataStorageBackend
    ) -> None:
        result = await backend.probe()
        assert result.available, result.detail

    async def test_creating_it_again_leaves_everything_as_it_is(
        self, backend: DataStorageBackend
    ) -> None:
        uris = await self._fill(backend, EXTENT)
        await backend.create()
        assert all([await self.read_block(uri) is not None for uri in uris])

    async def test_prepare_and_close_can_be_repeated(self, backend: DataStorageBackend) -> None:
        for _ in range(2):
            await backend.prepare(CLUSTER, EXTENT.instance_uid)
        for _ in range(2):
            await backend.close()

    async def test_a_closed_storage_frees_nothing_and_is_whole_when_opened_again(
        self, backend: DataStorageBackend
    ) -> None:
        uris, names = await self._fill(backend, EXTENT), self._names(backend, EXTENT)
        await backend.close()
        assert not (await backend.probe()).available
        try:
            answers = await backend.delete(names)
        except StorageError:
            pass
        else:
            assert len(answers) == len(names)
            assert all(isinstance(answer, StorageError) for answer in answers)
        # Blocks on a storage that is down can be given up, so their names must be known.
        assert self._names(backend, EXTENT) == names
        await backend.open()
        assert all([await self.read_block(uri) is not None for uri in uris])

    async def test_exists_compares_sizes_or_is_unsupported(
        self, backend: DataStorageBackend
    ) -> None:
        names = self._names(backend, EXTENT)
        if Capability.EXISTS not in backend.capabilities:
            with pytest.raises(Unsupported):
                await backend.exists(names, [1] * len(names))
            return
        assert await backend.exists(names, [1] * len(names)) == [False] * len(names)
        await self._fill(backend, EXTENT)
        objects = backend.objects(backend.place(EXTENT, SPECS), EXTENT, SPECS)
        sizes = [o.size for o in objects]
        assert await backend.exists(names, sizes) == [True] * len(names)
        sizes[0] += 1
        assert await backend.exists(names, sizes) == [False] + [True] * (len(names) - 1)

    async def test_list_names_what_was_written_or_is_unsupported(
        self, backend: DataStorageBackend
    ) -> None:
        if Capability.LIST not in backend.capabilities:
            with pytest.raises(Unsupported):
                await backend.list_objects(CLUSTER, EXTENT.instance_uid)
            return
        assert await backend.list_objects(CLUSTER, EXTENT.instance_uid) == []
        for extent in (EXTENT, NEIGHBOUR, OTHER_INSTANCE):
            await self._fill(backend, extent)
        written = self._names(backend, EXTENT) + self._names(backend, NEIGHBOUR)
        found = await backend.list_objects(CLUSTER, EXTENT.instance_uid)
        assert sorted(found) == sorted(written)
        pages = [page async for page in backend.survey(CLUSTER, EXTENT.instance_uid)]
        seen = [each for page in pages for each in page]
        assert sorted(each.name for each in seen) == sorted(written)
        assert all(each.size > 0 and each.age_s < 3600 for each in seen)
        assert {EXTENT.instance_uid, OTHER_INSTANCE.instance_uid} <= set(
            await backend.instances(CLUSTER)
        )
        assert await backend.leftovers() == []
        assert await self.delete(backend, found) == [None] * len(found)
        assert await backend.list_objects(CLUSTER, EXTENT.instance_uid) == []

    async def test_touch_keeps_bytes_or_is_unsupported(self, backend: DataStorageBackend) -> None:
        names = self._names(backend, EXTENT)
        if Capability.TOUCH not in backend.capabilities:
            with pytest.raises(Unsupported):
                await backend.touch(names)
            return
        await backend.touch(names)
        assert await backend.exists(names, [0] * len(names)) == [True] * len(names)
        uris = await self._fill(backend, EXTENT)
        await backend.touch(names)
        assert all([await self.read_block(uri) is not None for uri in uris])

    async def test_remove_instance_takes_only_what_is_empty_and_its_own(
        self, backend: DataStorageBackend
    ) -> None:
        mine = await self._fill(backend, EXTENT)
        others = await self._fill(backend, OTHER_INSTANCE)
        await backend.remove_instance(CLUSTER, EXTENT.instance_uid)
        assert all([await self.read_block(uri) is not None for uri in mine + others])
        await self.delete(backend, self._names(backend, EXTENT))
        for _ in range(2):
            await backend.remove_instance(CLUSTER, EXTENT.instance_uid)
        assert all([await self.read_block(uri) is not None for uri in others])


def _content(uri: str, size: int) -> bytes:
    """Bytes that tell their own address."""
    text = json.dumps([uri]).encode()
    return (text[-size:] * (size // len(text) + 1))[:size]
