"""The traces have the properties that the papers give for their workloads."""

import gzip
import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.bench.trace import Query, burst, conversations, mtrag, prose, skewed


def names(query: Query) -> set[str]:
    return {name for name, _ in query.documents}


@given(st.integers(0, 1000))
def test_neighbours_in_a_burst_share_exactly_three_of_five(seed: int) -> None:
    trace = burst(queries=40, regions=5, words=10, seed=seed)
    for start in range(0, 40, 10):
        one = trace[start : start + 10]
        assert len({name.split("-")[0] for query in one for name in names(query)}) == 1, "a burst stays in its region"
        assert [len(names(a) & names(b)) for a, b in pairwise(one)] == [3] * 9


def test_bursts_of_one_have_new_documents_only() -> None:
    trace = burst(queries=20, regions=20, burst=1, words=10)
    assert len({name for query in trace for name in names(query)}) == 100


def test_few_documents_of_the_skewed_trace_get_most_retrievals() -> None:
    trace = skewed(2000, words=5)
    asked = Counter(name for query in trace for name, _ in query.documents)
    most = [times for _, times in asked.most_common(6)]
    assert sum(most) / 4000 == pytest.approx(0.6, abs=0.03) and len(asked) == 200
    assert all(len(names(query)) == 2 for query in trace)
    assert skewed(5, words=5) == trace[:5] and skewed(5, words=5, seed=1) != trace[:5]


def test_a_burst_trace_is_as_large_as_the_papers() -> None:
    trace = burst()
    assert len(trace) == 200
    assert all(len(query.documents) == len(names(query)) == 5 for query in trace)
    assert len({query.session for query in trace}) == 200
    regions = [query.documents[0][0].split("-")[0] for query in trace[::10]]
    assert len(set(regions)) == 20, "every region has its turn before one comes again"
    assert len({query.question for query in trace}) == 200


def test_a_document_keeps_its_text_and_no_two_share_one() -> None:
    texts: dict[str, set[str]] = {}
    for query in burst():
        for name, text in query.documents:
            texts.setdefault(name, set()).add(text)
    assert all(len(of_name) == 1 for of_name in texts.values())
    assert len({text for of_name in texts.values() for text in of_name}) == len(texts)
    assert all(158 <= len(text.split()) < 190 for of_name in texts.values() for text in of_name)


def test_retrieval_rank_is_shuffled() -> None:
    trace = burst(queries=10, words=10)
    kept = [[name for name, _ in query.documents] for query in trace]
    assert any([name for name in a if name in b] != [name for name in b if name in a] for a, b in pairwise(kept)), (
        "with one order throughout, retrieval order would reuse as much"
    )


def test_traces_depend_on_the_seed_alone() -> None:
    assert burst(queries=20, words=10, seed=3) == burst(queries=20, words=10, seed=3)
    assert burst(queries=20, words=10, seed=3) != burst(queries=20, words=10, seed=4)
    assert conversations(seed=1) == conversations(seed=1)
    # Pinned, so that results of different machines and versions are comparable.
    assert prose("pinned", 12) == "At the end of the year, the complex example described the high head from the clear body."
    names_in_rank = [name for name, _ in burst(queries=1)[0].documents]
    assert names_in_rank == ["r37-d1", "r37-d5", "r37-d2", "r37-d3", "r37-d9"]


def test_overlap_that_a_region_cannot_give_is_refused() -> None:
    with pytest.raises(ValueError, match="regions of 6 documents cannot give 5 with only 3 shared"):
        burst(documents_per_region=6)


def test_conversations_take_turns() -> None:
    trace = conversations(count=3, turns=2)
    assert [(query.session, query.turn) for query in trace] == [
        ("c0", 1), ("c1", 1), ("c2", 1), ("c0", 2), ("c1", 2), ("c2", 2),
    ]  # fmt: skip
    assert len({query.question for query in trace}) == 6
    assert all(not query.documents for query in trace)


def write_mtrag(folder: Path) -> None:
    documents = [{"id": f"d{i}", "title": "", "text": f"\ntext {i}"} for i in range(4)]
    with gzip.open(folder / "documents.jsonl.gz", "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in documents)
    turns = [("a", 2), ("a", 1), ("b", 1), ("c", 1), ("b", 3)]
    with (folder / "rankings.jsonl").open("w") as out:
        for session, turn in turns:
            row = {"session": session, "turn": turn, "retriever": "elser", "query_form": "rewrite"}
            out.write(json.dumps(row | {"documents": ["d3", "d1", "d2"]}) + "\n")
            out.write(json.dumps(row | {"retriever": "bm25", "documents": ["d0"]}) + "\n")
    with (folder / "tasks.jsonl").open("w") as out:
        out.writelines(json.dumps({"session": s, "turn": t, "question": f"{s}{t}?"}) + "\n" for s, t in turns)


def test_mtrag_interleaves_active_sessions_with_turns_in_order(tmp_path: Path) -> None:
    write_mtrag(tmp_path)
    trace = mtrag(tmp_path, k=2, active=2)
    assert [query.question for query in trace] == ["a1?", "b1?", "a2?", "b3?", "c1?"]
    assert trace[0].documents == (("d3", "text 3"), ("d1", "text 1"))
    assert [query.question for query in mtrag(tmp_path, sessions=2, turns=1)] == ["a1?", "b1?"]


def test_mtrag_names_a_retriever_without_rankings(tmp_path: Path) -> None:
    write_mtrag(tmp_path)
    with pytest.raises(ValueError, match="no rankings of retriever 'bge'"):
        mtrag(tmp_path, retriever="bge")


@pytest.mark.skipif("SLOTCACHE_DATA" not in os.environ, reason="SLOTCACHE_DATA names no folder with mtrag_retrieved/")
def test_real_mtrag_has_its_turns_and_overlap() -> None:
    trace = mtrag(Path(os.environ["SLOTCACHE_DATA"]))
    assert len(trace) == 430
    assert all(len(query.documents) == 5 and all(text for _, text in query.documents) for query in trace)
    seen: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for query in trace:
        assert query.turn > last.get(query.session, 0)
        last[query.session] = query.turn
        seen.setdefault(query.session, set()).update(names(query))
    assert len(seen) == 61
