"""Requests carry what was asked, replies come back typed, over both transports."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from kvcm.client.errors import application_error, is_reportable, report_kind
from kvcm.client.types import Location
from kvcm.core.errors import (
    CapacityReached,
    DuplicateEntity,
    EntityNotExist,
    InstanceNotExist,
    InternalError,
    InvalidArgument,
    KvcmError,
    NoStorage,
    NotReady,
    SessionNotExist,
    StorageError,
    Unavailable,
    Unsupported,
    VersionConflict,
)
from kvcm.core.mask import BlockMask
from kvcm.core.types import (
    ModelDeployment,
    QueryType,
    ReportKind,
    ReportOutcome,
    StorageType,
    TrimStrategy,
)
from tests.client.conftest import Driver
from tests.client.stand_in import StandIn

EXTREMES = [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1]
LOCATION = {
    "type": 4,
    "spec_size": 2,
    "location_specs": [
        {"name": "tp0", "uri": "file://nfs_01/a?size=4"},
        {"name": "tp1", "uri": "file://nfs_01/b?size=4"},
    ],
}
PLACEHOLDER = {
    "type": 0,
    "spec_size": 2,
    "location_specs": [{"name": "tp0", "uri": ""}, {"name": "tp1", "uri": ""}],
}


async def test_register_sends_all_and_returns_the_storages(
    manager: StandIn, driver: Driver
) -> None:
    manager.answers(
        "RegisterInstance",
        storage_configs='[{"type":"file","is_available":true,"global_unique_name":"nfs_01",'
        '"storage_spec":{"root_path":"/tmp/nfs/","key_count_per_file":8}}]',
    )
    registration = await driver.call(
        "register_instance",
        "default",
        "i1",
        16,
        {"tp0": 2**40, "tp1": 5},
        model_deployment=ModelDeployment(model_name="m", use_mla=True, tp_size=2),
        location_spec_groups={"first": ["tp0"]},
        trace_id="t",
    )
    (request,) = manager.asked("RegisterInstance")
    assert (request.instance_group, request.instance_id) == ("default", "i1")
    assert request.block_size == 16
    assert request.trace_id == "t"
    sizes = {info.name: info.size for info in request.location_spec_infos}
    assert sizes == {"tp0": 2**40, "tp1": 5}
    assert request.model_deployment.model_name == "m"
    assert request.model_deployment.use_mla
    assert request.location_spec_groups[0].spec_names == ["tp0"]
    (storage,) = registration.storage_configs
    assert (storage.type, storage.global_unique_name, storage.is_available) == (
        "file",
        "nfs_01",
        True,
    )
    assert storage.storage_spec == {"root_path": "/tmp/nfs/", "key_count_per_file": 8}


async def test_instance_info_comes_back_whole(manager: StandIn, driver: Driver) -> None:
    manager.answers(
        "GetInstanceInfo",
        instance_group="default",
        instance_info={
            "instance_id": "i1",
            "block_size": 16,
            "location_spec_infos": [{"name": "tp0", "size": 2**40}],
            "location_spec_groups": [{"name": "g", "spec_names": ["tp0"]}],
            "model_deployment": {"model_name": "m", "pp_size": 3},
        },
    )
    info = await driver.call("get_instance_info", "i1")
    assert (info.instance_id, info.instance_group, info.block_size) == ("i1", "default", 16)
    assert info.location_spec_infos[0].size == 2**40
    assert info.location_spec_groups[0].spec_names == ("tp0",)
    assert info.model_deployment == ModelDeployment(model_name="m", pp_size=3)


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda keys: array("q", keys)])
async def test_keys_arrive_exactly_in_every_form(
    manager: StandIn, driver: Driver, form: type
) -> None:
    await driver.call("get_cache_location", "i1", form(EXTREMES), token_ids=form(EXTREMES))
    (request,) = manager.asked("GetCacheLocation")
    assert list(request.block_keys) == EXTREMES
    assert list(request.token_ids) == EXTREMES


async def test_a_lookup_sends_query_mask_window_and_specs(manager: StandIn, driver: Driver) -> None:
    manager.answers("GetCacheLocation", locations=[LOCATION, PLACEHOLDER])
    found = await driver.call(
        "get_cache_location",
        "i1",
        [1, 2],
        query=QueryType.REVERSE_ROLL_SW_MATCH,
        mask=[True, False],
        sw_size=1,
        spec_names=["tp0", "tp1"],
    )
    (request,) = manager.asked("GetCacheLocation")
    assert request.query_type == QueryType.REVERSE_ROLL_SW_MATCH
    assert request.block_mask.bool_masks.values == [True, False]
    assert request.sw_size == 1
    assert request.location_spec_names == ["tp0", "tp1"]
    uris = {"tp0": "file://nfs_01/a?size=4", "tp1": "file://nfs_01/b?size=4"}
    assert found.locations == [
        Location(StorageType.NFS, uris, 2),
        Location(StorageType.UNSPECIFIED, {"tp0": "", "tp1": ""}, 2),
    ]
    assert (len(found), found.hits) == (2, 1)
    assert found.locations.uris("tp1") == ["file://nfs_01/b?size=4", ""]
    assert found.locations.uris("tp9") == ["", ""]
    assert found.locations[-1:] == [found.locations[1]]


async def test_the_default_lookup_is_a_prefix_match_without_a_mask(
    manager: StandIn, driver: Driver
) -> None:
    await driver.call("get_cache_location", "i1", [1])
    (request,) = manager.asked("GetCacheLocation")
    assert request.query_type == QueryType.PREFIX_MATCH
    assert not request.HasField("block_mask")


@pytest.mark.parametrize("mask", [0, 3, BlockMask(offset=3)])
async def test_an_offset_mask_is_sent_even_when_it_is_0(
    manager: StandIn, driver: Driver, mask: BlockMask | int
) -> None:
    await driver.call("get_cache_location", "i1", [1], mask=mask)
    (request,) = manager.asked("GetCacheLocation")
    assert request.block_mask.WhichOneof("info") == "offset"
    assert request.block_mask.offset == (mask if isinstance(mask, int) else mask.offset)


async def test_metas_are_parsed(manager: StandIn, driver: Driver) -> None:
    manager.answers(
        "GetCacheMeta",
        locations=[LOCATION, PLACEHOLDER],
        metas=['{"id":"abcdefgh","status":"CLS_SERVING"}', '{"status":"CLS_NOT_FOUND"}'],
    )
    metas = await driver.call("get_cache_meta", "i1", [1, 2], detail_level=1, mask=0)
    assert [meta.status for meta in metas] == ["CLS_SERVING", "CLS_NOT_FOUND"]
    assert metas[0].meta["id"] == "abcdefgh"
    assert metas[0].location.found
    assert manager.asked("GetCacheMeta")[0].detail_level == 1


@pytest.mark.parametrize(
    ("block_mask", "count", "granted"),
    [
        ({"offset": 2}, 2, (2, 3)),
        ({"offset": 0}, 1, (0,)),
        ({"offset": 4}, 0, ()),
        ({"bool_masks": {"values": [True, False, False, True]}}, 2, (1, 2)),
    ],
)
async def test_a_grant_names_the_keys_to_write(
    manager: StandIn,
    driver: Driver,
    block_mask: dict[str, object],
    count: int,
    granted: tuple[int, ...],
) -> None:
    manager.answers(
        "StartWriteCache",
        write_session_id="s1",
        block_mask=block_mask,
        locations=[LOCATION] * count,
    )
    grant = await driver.call(
        "start_write_cache", "i1", [1, 2, 3, 4], spec_group_names=["g"] * 4, write_timeout_s=7
    )
    assert grant.session_id == "s1"
    assert grant.granted == granted
    assert len(grant.locations) == count
    (request,) = manager.asked("StartWriteCache")
    assert request.write_timeout_seconds == 7
    assert request.location_spec_group_names == ["g"] * 4


async def test_a_grant_that_contradicts_itself_is_refused(manager: StandIn, driver: Driver) -> None:
    manager.answers("StartWriteCache", block_mask={"bool_masks": {"values": [False]}}, locations=[])
    with pytest.raises(KvcmError, match="block_mask"):
        await driver.call("start_write_cache", "i1", [1])


async def test_finish_remove_and_trim_send_what_was_asked(manager: StandIn, driver: Driver) -> None:
    await driver.call("finish_write_cache", "i1", "s1", [True, False])
    await driver.call("finish_write_cache", "i1", "s1", 0)
    await driver.call("finish_write_cache", "i1", "s1", None)
    bools, offset, empty = manager.asked("FinishWriteCache")
    assert bools.success_blocks.bool_masks.values == [True, False]
    assert offset.success_blocks.WhichOneof("info") == "offset"
    assert empty.success_blocks.WhichOneof("info") == "bool_masks"
    assert not empty.success_blocks.bool_masks.values

    await driver.call("remove_cache", "i1", [1, 2], mask=1)
    assert manager.asked("RemoveCache")[0].block_mask.offset == 1
    await driver.call(
        "trim_cache", "i1", TrimStrategy.TIMESTAMP, begin_timestamp=5, end_timestamp=9
    )
    (trim,) = manager.asked("TrimCache")
    assert (trim.strategy, trim.begin_timestamp, trim.end_timestamp) == (3, 5, 9)


async def test_a_report_sends_locations_as_they_were_answered(
    manager: StandIn, driver: Driver
) -> None:
    manager.answers("GetCacheLocation", locations=[LOCATION, PLACEHOLDER])
    manager.answers("ReportCacheError", outcomes=[1, 0, 3, 77], accepted=1)
    found = await driver.call("get_cache_location", "i1", [1, 2], query=QueryType.BATCH_GET)
    said = [*found.locations, {"tp1": "file://nfs_01/b?size=4"}, {}]
    kinds = [ReportKind.MISSING, ReportKind.MISSING, ReportKind.CORRUPT, ReportKind.UNREACHABLE]
    report = await driver.call("report_cache_error", "i1", [1, 2, 3, 4], said, kinds)
    (request,) = manager.asked("ReportCacheError")
    assert list(request.block_keys) == [1, 2, 3, 4]
    assert [{s.name: s.uri for s in x.location_specs} for x in request.locations] == [
        {"tp0": "file://nfs_01/a?size=4", "tp1": "file://nfs_01/b?size=4"},
        {"tp0": "", "tp1": ""},
        {"tp1": "file://nfs_01/b?size=4"},
        {},
    ]
    assert list(request.kinds) == [1, 1, 2, 3]
    outcome = ReportOutcome
    assert report.outcomes == (outcome.ACCEPTED, outcome.NOTHING, outcome.NOT_VERIFIED, 77)
    assert (report.accepted, report.count(outcome.NOT_VERIFIED)) == (1, 1)
    await driver.call("report_cache_error", "i1", [1], found.locations[:1], ReportKind.CORRUPT)
    assert list(manager.asked("ReportCacheError")[1].kinds) == [2]


def test_what_an_sdk_answers_tells_how_to_report_it() -> None:
    assert report_kind(StorageError("gone", reason="MISSING")) is ReportKind.MISSING
    assert report_kind(StorageError("short", reason="TRUNCATED")) is ReportKind.MISSING
    assert report_kind(StorageError("input/output error")) is ReportKind.UNREACHABLE


def test_what_a_reader_itself_lacks_is_not_to_be_reported() -> None:
    assert not is_reportable(Unsupported("no SDK"))
    assert not is_reportable(InvalidArgument("no configuration"))
    assert is_reportable(StorageError("gone", reason="MISSING"))
    assert is_reportable(Unavailable("late", reason="DEADLINE"))


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("get_cache_location", {"keys": [2**63]}, "block_keys"),
        ("get_cache_location", {"keys": [1.5]}, "block_keys"),
        ("get_cache_location", {"keys": [1], "sw_size": 2**31}, "sw_size"),
        ("get_cache_location", {"keys": [1], "mask": 2**31}, "offset"),
        ("start_write_cache", {"keys": [1], "write_timeout_s": 2**31}, "write_timeout_seconds"),
    ],
)
async def test_a_value_the_wire_cannot_carry_is_refused_by_name_and_never_sent(
    manager: StandIn, driver: Driver, name: str, arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        await driver.call(name, "i1", **arguments)
    assert manager.requests == []


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (2, "", Unsupported),
        (3, "", InternalError),
        (4, "", NotReady),
        (5, "", InvalidArgument),
        (5, "SESSION_NOT_EXIST", SessionNotExist),
        (5, "ENTITY_NOT_EXIST", EntityNotExist),
        (5, "VERSION_CONFLICT", VersionConflict),
        (6, "", DuplicateEntity),
        (7, "QUOTA_GROUP", CapacityReached),
        (7, "NO_STORAGE", NoStorage),
        (8, "", InstanceNotExist),
        (20, "", StorageError),
        (100, "", KvcmError),
        (4711, "", KvcmError),
        (0, "", KvcmError),
    ],
)
def test_each_error_code_is_its_own_error(code: int, reason: str, kind: type[KvcmError]) -> None:
    error = application_error(code, "what is wrong", reason)
    assert type(error) is kind
    assert "what is wrong" in str(error)
    assert error.reason == (reason or kind.default_reason)


async def test_a_refusal_is_an_error_with_message_and_reason(
    manager: StandIn, driver: Driver
) -> None:
    manager.refuses("RegisterInstance", 7, "what is wrong", "MAX_KEY_COUNT")
    with pytest.raises(CapacityReached, match="what is wrong") as caught:
        await driver.call("register_instance", "g", "i", 1, {"tp0": 1})
    assert caught.value.reason == "MAX_KEY_COUNT"


async def test_a_partial_grant_carries_its_reason(manager: StandIn, driver: Driver) -> None:
    def partial(_request: object) -> object:
        reply = manager.reply_class("StartWriteCache")(
            write_session_id="s", block_mask={"offset": 0}, locations=[LOCATION]
        )
        reply.header.status.code = 1  # type: ignore[attr-defined]
        reply.header.status.reason = "QUOTA_TYPE"  # type: ignore[attr-defined]
        return reply

    manager.script["StartWriteCache"] = [partial]  # type: ignore[list-item]
    grant = await driver.call("start_write_cache", "i1", [1])
    assert grant.reason == "QUOTA_TYPE"


async def test_an_answer_without_a_status_is_an_error(manager: StandIn, driver: Driver) -> None:
    manager.script["TrimCache"] = [lambda _request: manager.reply_class("TrimCache")()]
    with pytest.raises(KvcmError, match=r"header\.status"):
        await driver.call("trim_cache", "i1")


async def test_a_reply_of_ten_thousand_locations_is_read_quickly(
    manager: StandIn, driver: Driver
) -> None:
    """More than a default gRPC client takes (4 MiB), and far below the default time-out."""
    specs = [{"name": "tp0", "uri": f"file://nfs_01/{'x' * 480}?size=4096"}]
    location = {"type": 4, "spec_size": 1, "location_specs": specs}
    manager.answers("GetCacheLocation", locations=[location] * 10_000)
    found = await driver.call("get_cache_location", "i1", range(10_000), timeout=10)
    assert len(found) == 10_000
    assert found.locations.uris("tp0")[-1] == specs[0]["uri"]


async def test_storage_types_of_the_future_are_numbers(manager: StandIn, driver: Driver) -> None:
    manager.answers(
        "GetCacheLocation",
        locations=[
            {"type": 77, "spec_size": 1, "location_specs": [{"name": "a", "uri": "new://x/y"}]}
        ],
    )
    found = await driver.call("get_cache_location", "i1", [1])
    assert found.locations[0].type == 77
