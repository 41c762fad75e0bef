"""A row names at most ROW_REFS_MAX locations."""

from __future__ import annotations

from pathlib import Path

from kvcm.core.limits import ROW_REFS_MAX
from tests.cache.harness import GRACE_S, Harness


async def test_a_block_with_ever_more_locations_gives_up_its_oldest(tmp_path: Path) -> None:
    """Each spec of a block asked for by itself is a location of its own: N fit, N + 1 do not."""
    specs = [(f"s{i}", 64) for i in range(ROW_REFS_MAX + 2)]
    groups = [(name, [name]) for name, _ in specs]
    h = await Harness(root=tmp_path).open()
    await h.register(specs=specs, groups=groups)
    for name, _ in specs[:ROW_REFS_MAX]:
        assert (await h.put([7], names=[name])).granted == [7]
    (row,) = await h.index().rows_of([7])
    assert len(row) == ROW_REFS_MAX
    assert (await h.start([7], names=["s0"])).granted == []
    for name, _ in specs[ROW_REFS_MAX:]:
        assert (await h.put([7], names=[name])).granted == [7]
        (row,) = await h.index().rows_of([7])
        assert len(row) == ROW_REFS_MAX
        assert (await h.start([7], names=[name])).granted == []
    # The two oldest are gone, their space too, and they can be written again.
    assert h.manager.usage().groups["default"].serving_bytes == ROW_REFS_MAX * 64
    await h.wait(GRACE_S + 1)
    assert len(h.files()) == ROW_REFS_MAX
    assert (await h.put([7], names=["s0"])).granted == [7]
    await h.drain()
    await h.check_rest()
    await h.close()
