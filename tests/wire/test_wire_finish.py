"""FinishWriteCache, and sessions that end in other ways (wire.md §5)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from wire_harness import Instance, code_of, message_of, reason_of, succeeded

from kvcm.testing.eventually import eventually_sync

Json = dict[str, Any]
T, F = True, False


def bools(*values: bool) -> Json:
    return {"bool_masks": {"values": list(values)}}


@pytest.mark.parametrize(
    ("success", "serving"),
    [
        (bools(T, T, T), [0, 1, 2]),
        (bools(T, F, T), [0, 2]),
        (bools(F, F, F), []),
        ({"offset": 3}, [0, 1, 2]),
        ({"offset": 1}, [0]),
        ({"offset": 0}, []),
    ],
)
def test_success_serves_and_failure_is_free_at_once(instance: Instance, success, serving):
    started = instance.start([10, 11, 12])
    succeeded(instance.finish(started["write_session_id"], success))
    expected = ["SERVING" if i in serving else "NOT_FOUND" for i in range(3)]
    assert instance.statuses([10, 11, 12]) == expected
    found = instance.batch([10, 11, 12])
    assert [i for i, entry in enumerate(found) if entry["type"] == "ST_NFS"] == serving
    again = instance.start([10, 11, 12])
    assert len(again["locations"]) == 3 - len(serving)


def test_the_mask_counts_the_granted_keys_not_those_of_the_request(instance: Instance):
    instance.write([2])
    started = instance.start([1, 2, 3])
    assert code_of(instance.finish(started["write_session_id"], bools(T, T, T))) == (
        "INVALID_ARGUMENT"
    )
    succeeded(instance.finish(started["write_session_id"], bools(F, T)))
    assert instance.statuses([1, 2, 3]) == ["NOT_FOUND", "SERVING", "SERVING"]


@pytest.mark.parametrize(
    "success",
    [bools(), bools(T), bools(T, T, T), {"offset": 3}, {"offset": -1}, {}, {"bool_masks": {}}],
)
def test_a_wrong_length_is_refused_and_the_session_stays_open(instance: Instance, success):
    started = instance.start([1, 2])
    answer = instance.finish(started["write_session_id"], success)
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert "success_blocks" in message_of(answer)
    assert instance.statuses([1, 2]) == ["WRITING", "WRITING"]
    succeeded(instance.finish(started["write_session_id"], {"offset": 2}))
    assert instance.statuses([1, 2]) == ["SERVING", "SERVING"]


def test_success_blocks_must_be_present(instance: Instance):
    for keys in ([1], []):
        session = instance.start(keys)["write_session_id"]
        answer = instance.call("FinishWriteCache", write_session_id=session)
        assert code_of(answer) == "INVALID_ARGUMENT"
        assert "success_blocks" in message_of(answer)


@pytest.mark.parametrize("success", [{}, {"bool_masks": {}}, {"offset": 0}, bools()])
def test_present_but_empty_is_right_for_a_session_that_granted_nothing(instance, success):
    instance.write([1])
    session = instance.start([1])["write_session_id"]
    succeeded(instance.finish(session, success))
    succeeded(instance.finish(session, success))


@pytest.mark.parametrize("success", [bools(T), {"offset": 1}, {"offset": -1}])
def test_a_session_that_granted_nothing_takes_no_other_mask(instance, success):
    instance.write([1])
    session = instance.start([1])["write_session_id"]
    assert code_of(instance.finish(session, success)) == "INVALID_ARGUMENT"
    succeeded(instance.finish(session, {"offset": 0}))


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (bools(T, F), bools(T, F), "OK"),
        (bools(T, F), {"offset": 1}, "OK"),
        ({"offset": 2}, bools(T, T), "OK"),
        (bools(F, F), {"offset": 0}, "OK"),
        (bools(T, F), bools(T, T), "INVALID_ARGUMENT"),
        (bools(T, F), bools(F, T), "INVALID_ARGUMENT"),
        ({"offset": 2}, {"offset": 1}, "INVALID_ARGUMENT"),
        (bools(F, F), bools(T, T), "INVALID_ARGUMENT"),
        (bools(T, F), bools(T), "INVALID_ARGUMENT"),
    ],
)
def test_finishing_again_is_ok_with_the_same_mask_only(instance, first, second, code):
    session = instance.start([1, 2])["write_session_id"]
    succeeded(instance.finish(session, first))
    before = instance.statuses([1, 2])
    assert code_of(instance.finish(session, second)) == code
    assert instance.statuses([1, 2]) == before
    assert code_of(instance.finish(session, first)) == "OK"


def test_finishing_again_is_ok_after_the_blocks_are_gone(instance: Instance):
    session = instance.start([1, 2])["write_session_id"]
    succeeded(instance.finish(session, bools(T, T)))
    instance.ok("RemoveCache", block_keys=[1, 2])
    succeeded(instance.finish(session, bools(T, T)))
    assert instance.statuses([1, 2]) == ["NOT_FOUND", "NOT_FOUND"]


UNKNOWN = ["", "x", "a" * 32, "0" * 32, "A" * 32, "-" * 32, "é" * 32, "a" * 5000, "a\0b" * 10]


@pytest.mark.parametrize("session", UNKNOWN, ids=range(len(UNKNOWN)))
def test_an_unknown_session_is_an_error(instance: Instance, session):
    answer = instance.finish(session, {"offset": 0})
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert reason_of(answer) == "SESSION_NOT_EXIST"


def test_a_session_id_with_one_character_changed_is_unknown(instance: Instance):
    instance.write([9])
    for keys in ([1, 2], [9]):
        session = instance.start(keys)["write_session_id"]
        for position in range(32):
            other = "a" if session[position] != "a" else "b"
            changed = session[:position] + other + session[position + 1 :]
            answer = instance.finish(changed, {"offset": 0})
            assert code_of(answer) == "INVALID_ARGUMENT", (keys, position)
    assert instance.statuses([1, 2]) == ["WRITING", "WRITING"]


def test_a_session_belongs_to_its_instance(register):
    ours, theirs = register(), register()
    theirs.write([9])
    for keys in ([1, 2], [9]):
        session = theirs.start(keys)["write_session_id"]
        answer = ours.finish(session, {"offset": 0})
        assert code_of(answer) == "INVALID_ARGUMENT", keys
        assert reason_of(answer) == "SESSION_NOT_EXIST"
    assert theirs.statuses([1, 2]) == ["WRITING", "WRITING"]
    assert ours.statuses([1, 2]) == ["NOT_FOUND", "NOT_FOUND"]


def test_an_expired_session_publishes_nothing_and_its_keys_are_free(instance: Instance):
    session = instance.start([1, 2], write_timeout_seconds=1)["write_session_id"]
    eventually_sync(lambda: instance.statuses([1, 2]) == ["NOT_FOUND", "NOT_FOUND"])
    answer = instance.finish(session, {"offset": 2})
    assert code_of(answer) == "INVALID_ARGUMENT"
    assert reason_of(answer) == "SESSION_NOT_EXIST"
    assert instance.batch([1, 2])[0]["type"] == "ST_UNSPECIFIED"
    assert instance.start([1, 2])["block_mask"] == {"offset": 0}


def test_a_late_finish_never_touches_what_another_session_has_done_since(instance: Instance):
    late = instance.start([1, 2], write_timeout_seconds=1)["write_session_id"]
    eventually_sync(lambda: instance.statuses([1, 2]) == ["NOT_FOUND", "NOT_FOUND"])
    second = instance.start([1, 2])
    for success in (bools(F, F), bools(T, T)):
        assert code_of(instance.finish(late, success)) == "INVALID_ARGUMENT"
    assert instance.statuses([1, 2]) == ["WRITING", "WRITING"]
    succeeded(instance.finish(second["write_session_id"], {"offset": 2}))
    assert code_of(instance.finish(late, bools(F, F))) == "INVALID_ARGUMENT"
    assert instance.batch([1, 2]) == second["locations"]


@pytest.mark.parametrize("timeout", [0, -1, -2147483648])
def test_no_time_out_is_the_servers_default(instance: Instance, timeout):
    """30 s: the session is open after a second, which a time-out of 0 would not be."""
    session = instance.start([1], write_timeout_seconds=timeout)["write_session_id"]
    short = instance.start([2], write_timeout_seconds=1)["write_session_id"]
    eventually_sync(lambda: instance.statuses([2]) == ["NOT_FOUND"])
    assert code_of(instance.finish(short, {"offset": 1})) == "INVALID_ARGUMENT"
    assert instance.statuses([1]) == ["WRITING"]
    succeeded(instance.finish(session, {"offset": 1}))


def test_the_locations_of_a_finish_are_ignored(instance: Instance):
    started = instance.start([1])
    wrong = {"type": "ST_3FS", "spec_size": -1, "location_specs": [{"name": "x", "uri": "y"}]}
    succeeded(instance.finish(started["write_session_id"], {"offset": 1}, locations=[wrong, wrong]))
    assert instance.batch([1]) == started["locations"]


def test_one_of_many_starts_of_the_same_keys_is_granted_each(instance: Instance):
    keys = list(range(50))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: instance.start(keys), range(16)))
    granted = sorted(len(answer["locations"]) for answer in answers)
    assert granted == [0] * 15 + [50]
    assert len({answer["write_session_id"] for answer in answers}) == 16
