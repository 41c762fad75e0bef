"""kvcm admin trash and removals against a real manager."""

from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk


def test_trash_and_removals_are_shown_while_they_are_under_way(kvcm, manager):
    assert kvcm.json("admin", "trash") == {"storages": []}
    assert kvcm.json("admin", "removals") == {"removals": []}
    assert "none" in kvcm.ok("admin", "removals")
    with Client(manager.target, timeout=10) as client:
        client.register_instance("default", "going", 16, {"tp0": 64})
        with client.write("going", [1, 2]) as session:
            session.put(FileSdk(), [{"tp0": b"x" * 64}, {"tp0": b"y" * 64}])
    kvcm.ok("admin", "instance", "remove", "going", "--yes")
    (removal,) = kvcm.json("admin", "removals")["removals"]
    assert (removal["what"], removal["instance"]) == ("instance", "going")
    assert removal["bytes"] + removal["trash_bytes"] >= 128
    assert "going" in kvcm.ok("admin", "removals")
    (trash,) = kvcm.json("admin", "trash")["storages"]
    assert trash["bytes"] >= 128
    assert trash["dead_letters"] == 0
    assert trash["storage"] in kvcm.ok("admin", "trash")
    assert kvcm.ok("admin", "trash", "retry") == "0 deletes are tried again\n"
    assert kvcm.ok("admin", "trash", "retry", "--storage", "nobody").startswith("0 ")
