"""An edit of one paragraph in a server's folder: the KV of all other documents is reused."""

from random import Random

from retrieval.manuals import sentences
from support.notes import is_ready
from support.office import Part, markdown

from server.conftest import running, until

SECTIONS, EDITED = 24, 10


def handbook():
    """Sections that are a document each, with a word in the heading that no other one has."""
    random = Random(1)
    for number in range(SECTIONS):
        yield Part("h2", f"Harbour zone{number}")
        yield from (Part("p", sentences(random, 8)) for _ in range(2))


def warmed(server):
    """The id of each section's document, and the tokens of it that are computed to bring it into the cache."""
    found = []
    for number in range(SECTIONS):
        wish = {"query": f"zone{number}", "top_k": 1}
        body = {"messages": [{"role": "user", "content": "What is it?"}], "retrieval": wish}
        (document,) = server.http.post("/v1/cache/warm", json=body).json()["slotcache"]["documents"]
        found.append((document["id"], document["tokens"] - document["cached_tokens"]))
    return found


def test_an_edit_leaves_the_kv_of_all_other_documents(tiny, tmp_path):
    parts, file = list(handbook()), tmp_path / "notes" / "handbook.md"
    file.parent.mkdir()
    file.write_bytes(markdown(parts))
    with running(tiny, docs=str(file.parent), docs_db=str(tmp_path / "db"), docs_watch=False, ctx_size=16384) as up:
        until(lambda: is_ready(up))
        first, again = warmed(up), warmed(up)
        ids = [id for id, _ in first]
        assert len(set(ids)) == SECTIONS and min(tokens for _, tokens in first) > 100
        assert again == [(id, 0) for id in ids]
        parts[3 * EDITED + 1] = Part("p", parts[3 * EDITED + 1].text.replace("the", "some"))
        file.write_bytes(markdown(parts))
        up.http.post("/v1/sources/refresh", json={})
        until(lambda: up.http.get(f"/v1/sources/{ids[EDITED]}").status_code == 404)
        edited = warmed(up)
    (changed, computed) = edited.pop(EDITED)
    assert changed not in ids and computed > 100
    assert edited == [(id, 0) for number, id in enumerate(ids) if number != EDITED]
