"""A new tier is one file, and one entry in the list of tiers."""

from slotcache.server import load
from slotcache.slots.scope import Scope
from support.remote import Remote

from server.conftest import REST, running
from server.engine.test_disk import BODY, cached


def test_a_server_writes_to_a_new_tier_and_starts_from_it(tiny, tmp_path, monkeypatch):
    remote, lower_tiers = Remote(1 << 30), load.lower_tiers
    monkeypatch.setattr(load, "lower_tiers", lambda *server: [*lower_tiers(*server), remote])
    with running(tiny, cache_dir=str(tmp_path)) as up:
        first = up.chat(**BODY)
        up.chat(**BODY | {"cache_scope": "drop"})
    for file in tmp_path.glob("*/*.kv"):
        file.unlink()
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = up.chat(**BODY)
        assert again["slotcache"]["source"] == "remote"
        assert up.metric("slotcache_cached_tokens_total", source="remote") == cached(again)
        assert up.metric("slotcache_remote_bytes") == remote.num_bytes > 0
        assert cached(again) == again["usage"]["prompt_tokens"] - REST and again["choices"] == first["choices"]
        up.http.delete("/v1/cache", params={"scope": "drop"})
    records = [remote.get(key) for key in remote.index.entries]
    assert {record.scope for record in records if record} == {Scope.shared("")} and all(records)
