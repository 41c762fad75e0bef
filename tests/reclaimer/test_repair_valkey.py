"""Repair with the index in Valkey: all kinds of damage at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.storage_backends import posix_survey
from kvcm.testing.servers_valkey import valkey_server
from tests.cache.harness import Harness
from tests.reclaimer import repair_damage as damage
from tests.reclaimer.repair_damage import contents, fixed, kinds, run


async def test_much_damage_at_once_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = posix_survey.file_system_time
    monkeypatch.setattr(
        posix_survey, "file_system_time", lambda root, name: real(root, name) + 86_400
    )
    with valkey_server() as server:
        h = await Harness(root=tmp_path, store=ValkeyStore(server.url)).open()
        await h.register()
        await h.put(range(150))
        expected: dict[str, int] = {}
        for harm in (
            damage.plant_a_file,
            damage.lose_a_file,
            damage.leave_a_probe,
            damage.drift_counters,
            damage.name_nobody,
            damage.lose_a_row,
            damage.leave_trash,
            damage.garble_a_state,
            damage.leave_a_stamp,
        ):
            for kind, count in (await harm(h)).items():
                expected[kind] = expected.get(kind, 0) + count
        before = await contents(h)
        report = await run(h)
        assert kinds(report) == expected, report.document()
        assert await contents(h) == before
        report = await run(h, fix=True, force=True)
        # That block's file is lost too, so it is given up instead of being named again.
        del expected["missing_row"]
        assert fixed(report) == expected, report.document()
        assert (await run(h)).clean
        await h.crash()
        assert (await run(h)).clean
        await h.drain()
        await h.check_rest()
        await h.close()
