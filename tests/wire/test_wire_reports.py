"""ReportCacheError, an addition of ours, over both transports (field case R56)."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from wire_harness import Instance, Wire, code_of, message_of, succeeded, uris

KEYS = [1, 2, 3, -(2**63), 2**63 - 1]
SIZES = {"tp0": 1000, "tp1": 500}


def fill(locations: list[dict]) -> None:
    for location in locations:
        for spec, uri in uris(location).items():
            path = Path(urlsplit(uri).path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                # Slots are granted in order.
                file.write(bytes(SIZES[spec]))


def path_of(location: dict, spec: str) -> Path:
    return Path(urlsplit(uris(location)[spec]).path)


def test_a_lost_file_is_a_miss_after_one_report(instance: Instance) -> None:
    fill(instance.write(KEYS))
    found = instance.prefix(KEYS)
    path_of(found[0], "tp1").unlink()
    said = {"block_keys": KEYS, "locations": found}
    answer = instance.ok("ReportCacheError", said, kinds=["CEK_MISSING"])
    assert list(answer)[1:] == [
        *("outcomes", "accepted", "stale", "not_verified", "unchecked", "limited")
    ]
    assert answer["outcomes"] == ["CEO_ACCEPTED"] * 5
    assert (answer["accepted"], answer["stale"]) == (5, 0)
    assert instance.prefix(KEYS) == []
    answer = instance.ok("ReportCacheError", said, kinds=["CEK_MISSING"])
    assert (answer["outcomes"], answer["stale"]) == (["CEO_STALE"] * 5, 5)
    again = instance.start(KEYS)
    assert len(again["locations"]) == 5
    assert not {*uris(again["locations"][0]).values()} & {*uris(found[0]).values()}


def test_each_key_has_its_outcome_and_what_is_there_stays(instance: Instance) -> None:
    fill(instance.write(KEYS))
    found = instance.prefix(KEYS)
    answer = instance.ok(
        "ReportCacheError",
        block_keys=KEYS,
        locations=[found[0], found[1], found[0], {}, {"location_specs": [{"name": "tp0"}]}],
        kinds=["CEK_MISSING", "CEK_CORRUPT", "CEK_CORRUPT", "CEK_MISSING", "CEK_MISSING"],
    )
    assert answer["outcomes"] == [
        *("CEO_NOT_VERIFIED", "CEO_ACCEPTED", "CEO_STALE", "CEO_NOTHING", "CEO_NOTHING")
    ]
    assert instance.batch(KEYS)[0] == found[0]
    assert instance.statuses(KEYS) == ["SERVING", "NOT_FOUND", "SERVING", "SERVING", "SERVING"]


def test_keys_may_come_as_tokens(instance: Instance) -> None:
    tokens = list(range(8))
    started = instance.ok("StartWriteCache", token_ids=tokens)
    done = {"offset": len(started["locations"])}
    succeeded(instance.finish(started["write_session_id"], done))
    answer = instance.ok(
        "ReportCacheError",
        token_ids=tokens,
        locations=started["locations"],
        kinds=["CEK_MISSING"],
    )
    assert answer["outcomes"] == ["CEO_ACCEPTED"] * 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"locations": []}, "locations"),
        ({"locations": [{}], "kinds": []}, "kinds"),
        ({"locations": [{}], "kinds": ["CEK_UNSPECIFIED"]}, "kinds[0]"),
        ({"locations": [{}], "kinds": ["CEK_MISSING", "CEK_CORRUPT"]}, "kinds"),
        (
            {"locations": [{"location_specs": [{"name": "tp0", "uri": "file://nobody/x"}]}]},
            "names no storage",
        ),
        (
            {"locations": [{"location_specs": [{"name": "tp7", "uri": "file://nfs_01/x"}]}]},
            "'tp7'",
        ),
    ],
)
def test_a_report_that_does_not_fit_is_refused_by_name(
    instance: Instance, fields: dict, named: str
) -> None:
    answer = instance.call(
        "ReportCacheError", {"block_keys": [1], "kinds": ["CEK_MISSING"], **fields}
    )
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert named in message_of(answer)


def test_an_unknown_instance_is_told(wire: Wire) -> None:
    answer = wire.call("ReportCacheError", instance_id="nobody")
    assert code_of(answer) == "INSTANCE_NOT_EXIST"
