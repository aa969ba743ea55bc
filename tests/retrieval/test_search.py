"""Searches: by words, by vectors, fused, reranked; in stages, in some paths, and with hostile queries."""

import asyncio
from random import Random
from time import thread_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.retrieval import FUSED, LEXICAL, RERANKED, Embedder, Index, Query
from slotcache.retrieval import words as words_module
from slotcache.retrieval.ranking import VectorIndex, fuse, unit
from slotcache.retrieval.words import fts_query, search_words, words_sought
from support.notes import write

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
    folder = write(tmp_path_factory.mktemp("notes"), NOTES)
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
    (stage,) = stages(index.search(), text="moon water port month", min_score=0.0, paths=(asked.format(root=root),))
    assert sorted(paths(stage.hits)) == ["sea/ports.md", "sea/tides.md"]
    for whole in (".", "/", "", root, root + "/"):
        (stage,) = stages(index.search(), text="moon water port month", min_score=0.0, paths=("nowhere", whole))
        assert len(stage.hits) == 4
    for outside in ("..", root + "x", "/etc", "sea2"):
        assert not stages(index.search(), text="moon water port month", min_score=0.0, paths=(outside,))[0].hits


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
    for stage in stages(index.search(embed_query), text="moon water port month", min_score=0.0, paths=search_paths):
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
    query = fts_query(words_sought("old " * 10 + " ".join(map(str, range(5000))) + " tides"))
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


# ---- Words alone or vectors alone, the floor, scores, and the depth of a reranker. --------------------------------------


def test_words_and_vectors_can_each_be_asked_alone(index):
    (words,) = stages(index.search(embed_query), text="ebb and flood at the port", by="words")
    assert words.name == LEXICAL and words.is_last and paths(words.hits) == ["sea/ports.md"]
    (vectors,) = stages(index.search(embed_query), text="ebb and flood of tides", by="vectors")
    assert vectors.name == FUSED and vectors.is_last and paths(vectors.hits)[0] == "sea/tides.md"
    first = vectors.hits[0]
    assert first.lexical_rank is None and first.vector_rank == 1 and first.score == first.similarity > 0.9


def test_a_search_by_vectors_alone_finds_nothing_where_there_are_none(index):
    (stage,) = stages(index.search(), text="tides", by="vectors")
    assert stage.is_last and not stage.hits


GERMAN = {
    "miete.md": "# Mietvertrag\n\nDie Miete beträgt 940 Euro im Monat und ist bis zum dritten Werktag zu zahlen.\n",
    "urlaub.md": "# Urlaub\n\nIm August fahren wir nach Dänemark. Das Haus kostet 1200 Euro in der Woche.\n",
    "auto.md": "# Auto\n\nDie nächste Inspektion ist im Monat März fällig. Der Reifenwechsel kostet 60 Euro.\n",
}


@pytest.fixture
def folder_of(tmp_path):
    """Return what makes an index of texts by the names of their files."""
    made = []

    def make(texts, **options):
        folder = write(tmp_path / f"notes{len(made)}", texts)
        made.append(Index([folder], folder.with_suffix(".db"), **options))
        made[-1].refresh()
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_documents_far_below_the_best_one_do_not_ride_along(folder_of):
    index = folder_of(GERMAN)
    (stage,) = stages(index.search(), text="Wie hoch ist die Miete im Monat?")
    assert paths(stage.hits) == ["miete.md"] and stage.left_out == 1
    (stage,) = stages(index.search(), text="Wie hoch ist die Miete im Monat?", min_score=0.0)
    assert paths(stage.hits) == ["miete.md", "auto.md"] and stage.left_out == 0, "a floor of one's own counts instead"
    (stage,) = stages(index.search(), text="Wie hoch ist die Miete, und was kostet der Reifenwechsel?")
    assert {"miete.md", "auto.md"} <= {*paths(stage.hits)}, "a question about two files has both"


def test_a_word_that_most_documents_have_scores_above_0(folder_of):
    index = folder_of({f"{at}.md": f"# Note {at}\n\nThe pump has number {at}.\n" for at in range(4)})
    found = search_words(index.store, "pump", 5)
    assert len(found) == 4 and all(round(score, 4) > 0 for _, score in found)


def test_of_two_like_documents_that_of_the_better_file_is_first(folder_of):
    filler = "Nothing more is said of it. " * 30
    same = f"## Setting\n\nThe valve is set by hand.\n\n## Rest\n\n{filler}\n\n"
    index = folder_of(
        {
            "a.md": f"# A\n\n{same}## Weather\n\n{'It rains all day here. ' * 40}",
            "b.md": f"# B\n\n{same}## Valve\n\n{'The valve is open, mostly. ' * 40}",
        }
    )
    query = "valve set hand"
    found = search_words(index.store, query, 10)
    chunks = index.store.chunks(number for number, _ in found)
    settings = [chunks[number].places[0].path for number, _ in found if "by hand" in chunks[number].text]
    assert settings == ["b.md", "a.md"]


def test_a_reranker_reads_fifty_documents(folder_of):
    index = folder_of({f"{at:02}.md": f"# Note {at}\n\nThe pump has number {at}.\n" for at in range(60)})
    read = []

    async def rerank(query, texts):
        read.append(len(texts))
        return [float(text.endswith(" 49.")) for text in texts]

    *_, last = stages(index.search(rerank=rerank), text="pump")
    assert read == [50] and last.name == RERANKED and len(last.hits) == 5
    assert last.hits[0].lexical_rank == 50 and last.hits[0].score == 1.0


def test_an_embedder_of_one_language_is_used_where_most_documents_are_in_it(folder_of):
    def make(texts):
        return folder_of(texts, embedder=Embedder("meanings", embed, "en"))

    english = {
        f"{at}.md": f"# Note {at}\n\nThis is what the moon does with the tides, and it is so in {at}.\n" for at in range(5)
    }
    index = make(english)
    assert index.has_vectors and index.progress.vectors == 5
    assert [stage.name for stage in stages(index.search(embed_query), text="moon")] == [LEXICAL, FUSED]
    for foreign in (GERMAN, {"thai.md": "# สวัสดี\n\nภาษาไทยเป็นภาษาที่มีระดับเสียง\n"}):
        index = make(foreign)
        assert not index.has_vectors and index.progress.vectors == 0
        assert [stage.name for stage in stages(index.search(embed_query), text="Miete")] == [LEXICAL]


@pytest.mark.parametrize(("step", "writes"), [("_numbers", True), ("_has_terms", False)], ids=["more", "less"])
def test_a_search_sees_one_state_of_an_index_that_is_written_meanwhile(tmp_path, monkeypatch, step, writes):
    """Figures of fewer texts than were found made all scores negative; a text that had gone ended the search."""
    (folder := tmp_path / "notes").mkdir()
    for name in "ab":
        (folder / f"{name}.md").write_text(f"The stone {name} is old.\n")
    index, other = Index([folder], tmp_path / "db"), Index([folder], tmp_path / "db")
    index.refresh()
    real = getattr(words_module, step)

    def write_first(given):
        for number in range(50) if writes else ():
            (folder / f"{number}.md").write_text(f"The stone {number} is old.\n")
        if not writes:
            (folder / "a.md").unlink()
        assert other.refresh()
        return real(given)

    with monkeypatch.context() as patched:
        patched.setattr(words_module, step, write_first)
        hits = asyncio.run(index.search().hits(Query(text="Which stone is old?")))
    assert hits and all(hit.score > 0 for hit in hits)
    assert len(asyncio.run(index.search().hits(Query(text="Which stone is old?", top_k=60)))) == (52 if writes else 1)
    other.close()
    index.close()
