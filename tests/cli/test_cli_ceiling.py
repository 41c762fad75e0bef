"""kvcm admin ceiling against a real manager."""

from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk


def test_hit_rate_and_ceiling_are_shown_with_an_advice(kvcm, manager):
    assert kvcm.json("admin", "ceiling")["scopes"] == []
    assert "no prefix lookup" in kvcm.ok("admin", "ceiling")
    keys = list(range(1, 601))
    with Client(manager.target, timeout=10) as client:
        client.register_instance("default", "asking", 16, {"tp0": 64})
        assert client.get_cache_location("asking", keys).hits == 0
        with client.write("asking", keys[:450]) as session:
            session.put(FileSdk(), [{"tp0": b"x" * 64} for _ in keys[:450]])
        assert client.get_cache_location("asking", keys).hits == 450
    group, instance = kvcm.json("admin", "ceiling")["scopes"]
    assert (group["instance"], instance["instance"]) == ("", "asking")
    day = instance["windows"][2]
    assert (day["blocks"], day["hits"]) == (1_200, 450)
    assert (day["misses"]["new"], day["misses"]["never_written"]) == (600, 150)
    shown = kvcm.ok("admin", "ceiling")
    assert "37.5%" in shown
    assert "new 50.0%, never written 12.5%" in shown.replace("\n", "")
    assert "24h" in shown
    assert "15m" not in shown
    assert "15m" in kvcm.ok("admin", "ceiling", "--window", "all")
