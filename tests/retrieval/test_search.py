"""Searches: by words, by vectors, fused, reranked; in stages, in some paths, and with hostile queries."""

import asyncio
from random import Random
from time import thread_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.retrieval import FUSED, LEXICAL, RERANKED, Embedder, Index, Query
from slotcache.retrieval.ranking import VectorIndex, fts_query, fuse, search_words, unit

NOTES = {
    "sea/tides.md": "# Tides\n\nThe moon raises two tides a day.\n",
    "sea/ports.md": "# Ports\n\nThe port closes at low water.\n",
    "land/bread.md": "# Bread\n\nRye flour, salt and water.\n",
    "land/moon.md": "# Moon\n\nIt circles us in a month.\n",
}
MEANINGS = ("moon tides ebb flood", "port harbour ships", "bread flour baking", "month orbit")


def embed(texts):
    """Return vectors that tell to which of the meanings a text belongs."""
    found = [[sum(word in text.lower() for word in meaning.split()) for meaning in MEANINGS] for text in texts]
    return np.array(found, np.float32) + 0.01


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notes")
    for path, text in NOTES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    made = Index([folder], folder.with_suffix(".db"), embedder=Embedder("meanings", embed))
    made.refresh()
    yield made
    made.close()


def stages(search, **query):
    async def collect():
        return [stage async for stage in search.stages(Query(**query))]

    return asyncio.run(collect())


def paths(hits):
    return [hit.chunk.places[0].path for hit in hits]


async def embed_query(text):
    return embed([text])[0]


def test_words_alone_are_one_stage(index):
    (stage,) = stages(index.search(), text="When does the moon circle?")
    assert (stage.name, stage.is_last) == (LEXICAL, True)
    assert paths(stage.hits)[0] == "land/moon.md" and stage.hits[0].lexical_rank == 1  # its title counts twice
    assert stage.hits[0].document.title == "Moon" and stage.hits[0].document.id == stage.hits[0].chunk.id
    assert stage.hits[0].similarity is None


def test_stages_follow_each_other(index):
    async def rerank(query, texts):
        return [-len(text) for text in texts]

    found = stages(index.search(embed_query, rerank), text="ebb and flood", top_k=3)
    assert [(stage.name, stage.is_last) for stage in found] == [(LEXICAL, False), (FUSED, False), (RERANKED, True)]
    lexical, fused, reranked = found
    assert not lexical.hits and paths(fused.hits)[0] == "sea/tides.md"
    first = fused.hits[0]
    assert first.vector_rank == 1 and first.similarity > 0.9 and 0 < first.score <= 1
    sizes = [len(hit.chunk.title) + len(hit.chunk.text) for hit in reranked.hits]
    assert sizes == sorted(sizes) and len(sizes) == 3


def test_a_search_can_end_after_a_stage(index):
    cancelled = []

    async def slow(text):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(text)
            raise

    async def first():
        found = index.search(slow).stages(Query(text="moon"))
        async for stage in found:
            await found.aclose()
            return stage.name

    assert asyncio.run(first()) == LEXICAL and cancelled == ["moon"]


def test_an_error_of_the_embedder_comes_after_the_words(index):
    async def broken(text):
        raise OSError("no embedder")

    seen = []

    async def collect():
        async for stage in index.search(broken).stages(Query(text="moon")):
            seen.append(stage.name)

    with pytest.raises(OSError, match="no embedder"):
        asyncio.run(collect())
    assert seen == [LEXICAL]


@pytest.mark.parametrize("asked", ["./sea", "sea/", "/sea", "land/../sea", "{root}/sea", "{root}/sea/../sea/"])
def test_a_path_may_be_written_in_any_way(index, asked):
    root = str(index.folders[0].root)
    (stage,) = stages(index.search(), text="moon water port month", paths=(asked.format(root=root),))
    assert sorted(paths(stage.hits)) == ["sea/ports.md", "sea/tides.md"]
    for whole in (".", "/", "", root, root + "/"):
        (stage,) = stages(index.search(), text="moon water port month", paths=("nowhere", whole))
        assert len(stage.hits) == 4
    for outside in ("..", root + "x", "/etc", "sea2"):
        assert not stages(index.search(), text="moon water port month", paths=(outside,))[0].hits


def test_a_search_in_a_folder_takes_no_longer_than_one_in_all(tmp_path):
    for number in range(2):
        sections = (f"# {number} {at}\n\n" + "The moon raises two tides a day. " * 20 for at in range(250))
        (tmp_path / "notes").mkdir(exist_ok=True)
        (tmp_path / f"notes/{number}.md").write_text("\n\n".join(sections))
    index = Index([tmp_path / "notes", tmp_path / "notes/0.md"], tmp_path / "index.db")
    try:
        index.refresh()
        assert index.progress.chunks > 400

        def seconds(paths):
            began = thread_time()
            assert len(search_words(index.store, "moon tides", 50, paths)) == 50
            return thread_time() - began

        assert min(seconds(["notes"]) for _ in range(3)) < 10 * min(seconds([]) for _ in range(3)) + 0.1
    finally:
        index.close()


@pytest.mark.parametrize("search_paths, expected", [(("sea",), 2), (("sea/", "land/moon.md"), 3), (("se", "%", "*"), 0)])
def test_a_search_stays_in_its_paths(index, search_paths, expected):
    for stage in stages(index.search(embed_query), text="moon water port month", paths=search_paths):
        assert len(stage.hits) == expected
        assert all(path.startswith(search_paths) for path in paths(stage.hits))


def test_limits_of_a_query(index):
    assert len(stages(index.search(embed_query), text="moon water", top_k=1)[-1].hits) == 1
    best = stages(index.search(embed_query), text="moon water")[-1].hits[0].score
    assert len(stages(index.search(embed_query), text="moon water", min_score=best)[-1].hits) == 1
    with pytest.raises(ValueError, match="top_k"):
        Query(text="a", top_k=0)
    with pytest.raises(ValueError, match="101 paths"):
        Query(text="a", paths=("a",) * 101)


@pytest.mark.parametrize(
    "text",
    [
        '"',
        "moon OR",
        "NEAR(moon tides)",
        "title:moon",
        "moon*",
        "^moon",
        "-moon",
        "{a} : b",
        "a\0b",
        "\ud800",
        "NOT",
        "()",
        "語 έ",
    ],
)
def test_a_query_has_no_syntax(index, text):
    for stage in stages(index.search(embed_query), text=text):
        assert ("moon" in text) <= bool(stage.hits)


@given(st.text(max_size=80))
def test_any_text_is_a_query(index, text):
    search_words(index.store, text, 5)


def test_a_long_query_ends_in_its_question():
    query = fts_query("old " * 10 + " ".join(map(str, range(5000))) + " tides")
    assert query.startswith('"tides" OR "4999"') and query.count("OR") == 63


def test_a_fusion_weighs_its_rankings():
    fused = dict(fuse([([1, 2], 1.0), ([2, 1], 2.0)], k=10))
    assert list(fused) == [2, 1] and fused == pytest.approx({2: (11 / 12 + 2) / 3, 1: (1 + 22 / 12) / 3})
    assert fuse([([7], 1.0)]) == [(7, 1.0)] and fuse([([], 1.0), ([], 2.0)]) == []


def test_vectors_are_found_as_a_plain_search_finds_them():
    random = Random(5)
    rows = np.random.default_rng(5).standard_normal((300, 16)).astype(np.float32)
    index, known = VectorIndex(np.zeros(0, np.int64), np.zeros((0, 0), np.float16)), {}
    query = rows[0]
    assert index.search(query, 3) == []
    for number in range(300):
        known[number] = unit(rows[number : number + 1])[0]
        index.add([number], known[number][None])
        if random.random() < 0.3:
            gone = random.sample(sorted(known), min(3, len(known)))
            index.remove([*gone, 999])
            known = {kept: vector for kept, vector in known.items() if kept not in gone}
        if number % 20 == 0 and known:
            best = sorted(known, key=lambda at: -float(known[at] @ unit(query[None])[0]))
            assert [at for at, _ in index.search(query, 7)] == best[:7]
            some = np.array(best[::2])
            assert [at for at, _ in index.search(query, 7, some)] == best[::2][:7]
    assert len(index) == len(known)
    assert (unit(np.array([[np.nan, np.inf], [0, 0]])) == 0).all()


def test_texts_without_spaces_between_words_are_found(tmp_path):
    texts = {
        "zh.md": "# 灯塔\n\n东港的灯塔建于1874年,由工程师李明设计。",
        "ja.md": "# 灯台\n\n港の灯台は赤く、毎晩六時に点灯されるRAG装置がある。",
        "other.md": "# 山\n\n山里人家不种茶。",
        "en.md": "# Lighthouse\n\nThe lamp is red.",
    }
    (tmp_path / "notes").mkdir()
    for name, text in texts.items():
        (tmp_path / "notes" / name).write_text(text)
    index = Index([tmp_path / "notes"], tmp_path / "index.db")
    index.refresh()

    def first(question):
        return paths(stages(index.search(), text=question)[0].hits)[0]

    assert first("灯塔是谁设计的?") == "zh.md" and first("工程师") == "zh.md"
    assert first("灯台は何時に点灯されますか") == "ja.md" and first("RAG装置") == "ja.md"
    assert first("山") == "other.md" and first("What is red?") == "en.md"
    assert first("种茶") == "other.md"
    assert not stages(index.search(), text="人种")[0].hits, "neighbours must be neighbours in the text, too"
    (tmp_path / "notes" / "zh.md").unlink()
    assert index.refresh() and not stages(index.search(), text="工程师")[0].hits
    index.store.check()
    index.close()
