"""Vectors in clusters: found as by the exact search, in groups; kept, made anew, and lost without loss."""

import asyncio
import logging
import os
from importlib import import_module
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from slotcache.retrieval import FUSED, LEXICAL, PROVISIONAL, Query, ann
from slotcache.retrieval import index as index_module

pytest.importorskip("faiss", reason="pip install 'slotcache[ann]'")
WIDTH, FROM = 16, 40
SUBJECTS = ("stone", "river", "light", "mill")


def vector_of(text):
    """One of a text's own, near those of texts with the same first word."""
    subject, own = (np.random.default_rng(list(part.encode())).standard_normal(WIDTH) for part in (text.split()[-3], text))
    return subject + own


def embed(texts):
    return np.array([vector_of(text) for text in texts], np.float32)


async def embed_query(text):
    return vector_of(text).astype(np.float32)


def write(folder, numbers):
    for number in numbers:
        (folder / f"{number}.md").write_text(f"The {SUBJECTS[number % 4]} has {number}.\n")


@pytest.fixture
def make(make):
    """Brings the index up to date, too."""

    def open_index(name="subjects", clusters_from=FROM, refreshed=True):
        index = make(embed, name, clusters_from=clusters_from)
        assert not refreshed or index.refresh()
        return index

    return open_index


def nearest(index, query, limit=7, only=None):
    *_, (found, is_last) = index.vectors.groups(query, limit, only)
    assert is_last
    return found


def of_clusters(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".ivf")


def check_as_exact(index, only=None):
    """What is found in all clusters is what the exact search finds, to the cosine."""
    exact = index_module.VectorIndex(*index.store.vectors())
    assert len(index.vectors) == len(exact) == index.progress.vectors
    for query in np.random.default_rng(1).standard_normal((20, WIDTH)).astype(np.float32):
        found, right = nearest(index, query, only=only), exact.search(query, 7, only)
        assert [number for number, _ in found] == [number for number, _ in right]
        assert [cosine for _, cosine in found] == pytest.approx([cosine for _, cosine in right], abs=1e-5)


def no_memory(*given):
    """As faiss reads a length that is damaged."""
    raise MemoryError("std::bad_alloc")


@pytest.fixture
def everywhere(monkeypatch):
    """A search compares all clusters."""
    monkeypatch.setattr(ann, "SHARE", 1.0)


def _warned(caplog):
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_so_many_vectors_are_searched_in_clusters(folder, make, tmp_path, everywhere, caplog):
    caplog.set_level(logging.INFO, "slotcache.docs")
    write(folder, range(FROM - 1))
    assert make().progress.clusters == 0 and not of_clusters(tmp_path)
    write(folder, range(FROM, FROM + 30))
    index = make()
    assert index.progress.clusters == 8 == index.vectors.num_clusters and len(of_clusters(tmp_path)) == 1
    assert "69 vectors are searched in 8 clusters" in caplog.text
    check_as_exact(index)
    index = make(refreshed=False)
    assert index.progress.clusters == 8, "they are there at the next start, before anything is read"
    check_as_exact(index)


def test_a_search_goes_group_by_group(folder, make, everywhere):
    write(folder, range(100))
    query = np.random.default_rng(7).standard_normal(WIDTH).astype(np.float32)
    found = [(found, is_last) for found, is_last in make().vectors.groups(query, 5)]
    assert [is_last for _, is_last in found] == [False] * (min(ann.GROUPS, 10) - 1) + [True]
    worst = [cosines[-1][1] for cosines, _ in found if len(cosines) == 5]
    assert worst == sorted(worst) and worst[0] < worst[-1], "each group leaves the best so far"


def test_a_search_compares_a_share_of_the_clusters_those_nearest_first(folder, make, monkeypatch):
    write(folder, range(100))
    monkeypatch.setattr(ann, "SHARE", 0.2)
    index = make()
    number, query = index.store.vectors()[0][7], index.store.vectors()[1][7].astype(np.float32)
    ((first, is_last), _) = index.vectors.groups(query, 100)
    assert first[0] == (number, pytest.approx(1.0, abs=1e-3)) and not is_last
    assert len(nearest(index, query, 100)) < 60


def test_the_provisional_documents_of_a_search_are_stages(folder, make, everywhere):
    write(folder, range(100))
    index = make()

    async def stages(text):
        return [stage async for stage in index.search(embed_query).stages(Query(text=text, top_k=3))]

    changes = 0
    for number in range(200, 220):
        first, *provisional, last = asyncio.run(stages(f"The {SUBJECTS[number % 4]} has {number}."))
        assert (first.name, last.name, last.is_last) == (LEXICAL, FUSED, True)
        assert {(stage.name, stage.is_last) for stage in provisional} == {(PROVISIONAL, False)}
        documents = [[hit.chunk.number for hit in stage.hits] for stage in provisional]
        assert all(a != b for a, b in pairwise(documents)), "a stage has other documents"
        assert len(provisional) < ann.GROUPS
        changes += len(provisional) - 1
    assert changes, "no search has found something better later"


def test_a_group_that_changes_no_document_is_no_stage(folder, make, monkeypatch):
    write(folder, range(100))
    index = make()
    monkeypatch.setattr(index.vectors, "groups", lambda *given: iter([([], False), ([], False), ([], True)]))

    async def names(**wishes):
        query = Query(text="The mill has 7.", top_k=3, **wishes)
        return [stage.name async for stage in index.search(embed_query).stages(query)]

    assert asyncio.run(names()) == [LEXICAL, FUSED]
    monkeypatch.undo()
    assert asyncio.run(names(min_score=1e9)) == [LEXICAL, FUSED], "none is shown at any time"


def test_new_and_removed_vectors_need_no_new_clusters(folder, make, tmp_path, everywhere):
    write(folder, range(100))
    index, before = make(), of_clusters(tmp_path)
    for number in Random(3).sample(range(100), 20):
        (folder / f"{number}.md").unlink()
    write(folder, range(100, 120))
    assert index.refresh()
    check_as_exact(index)
    check_as_exact(make(refreshed=False))
    assert of_clusters(tmp_path) == before


def test_paths_are_searched_in_all_clusters(folder, make):
    write(folder, range(100))
    index = make()
    numbers = index.store.vectors()[0]
    check_as_exact(index, only=numbers[::9])
    check_as_exact(index, only=numbers[:0])
    (folder / "9.md").unlink()
    index.refresh()
    check_as_exact(index, only=numbers[::9])


def test_clusters_are_made_anew_where_half_has_changed(folder, make, tmp_path, everywhere):
    write(folder, range(100))
    index, before = make(), of_clusters(tmp_path)
    write(folder, range(100, 210))
    assert index.refresh() and index.progress.clusters == 14
    assert len(of_clusters(tmp_path)) == 1 and of_clusters(tmp_path) != before
    check_as_exact(index)


def test_few_that_are_left_are_compared_one_by_one(folder, make, tmp_path):
    write(folder, range(60))
    index = make()
    assert index.progress.clusters
    for number in range(45):
        (folder / f"{number}.md").unlink()
    assert index.refresh() and index.progress.clusters == 0 and not of_clusters(tmp_path)
    check_as_exact(index)
    assert make().progress.clusters == 0


def test_a_folder_that_is_emptied_while_clusters_are_made_has_some_once_it_is_full_again(
    folder, make, tmp_path, everywhere, caplog
):
    write(folder, range(60))
    index = make(clusters_from=1000)
    index._clusters_from = FROM
    for path in folder.iterdir():
        path.unlink()
    start, index._maker.start = index._maker.start, lambda: None
    assert index.refresh() and not index.progress.vectors
    start()
    assert index.cluster() and not index.progress.clusters and not _warned(caplog) and not of_clusters(tmp_path)
    index._maker.start = start
    write(folder, range(60))
    assert index.refresh() and index.progress.clusters
    check_as_exact(index)


def test_vectors_that_came_since_are_read_in_batches(folder, make, everywhere, monkeypatch):
    write(folder, range(100))
    make()
    write(folder, range(100, 140))
    make()
    monkeypatch.setattr(ann, "BATCH", 7)
    read, sizes = ann.Store.vectors, []
    monkeypatch.setattr(ann.Store, "vectors", lambda *given: sizes.append(len((found := read(*given))[0])) or found)
    index = make(refreshed=False)
    assert sizes == [7] * 5 + [5, 0]
    check_as_exact(index)


def test_another_embedder_has_none_of_the_clusters(folder, make, tmp_path):
    write(folder, range(100))
    assert make().progress.clusters
    index = make("another", refreshed=False)
    assert index.progress.clusters == len(index.vectors) == 0 and not of_clusters(tmp_path)
    assert index.refresh() and index.progress.clusters == 10


@pytest.mark.parametrize("damage", ["cut", "gone", "other bytes", "of another state", "of more memory than there is"])
def test_clusters_that_cannot_be_used_are_made_again(folder, make, tmp_path, everywhere, caplog, damage, monkeypatch):
    write(folder, range(100))
    index = make()
    (name,) = of_clusters(tmp_path)
    read_index = import_module("faiss").read_index
    data, path = (tmp_path / name).read_bytes(), tmp_path / name
    if damage == "gone":
        path.unlink()
    elif damage == "of another state":
        index.store.clusters = index.store.clusters.replace(":100}", ":99}")
    elif damage == "of more memory than there is":
        monkeypatch.setattr(import_module("faiss"), "read_index", no_memory)
    else:
        path.write_bytes(data[:-100] if damage == "cut" else bytes(len(data)))
    index = make(refreshed=False)
    monkeypatch.setattr(import_module("faiss"), "read_index", read_index)
    assert len(_warned(caplog)) == 1 and "they are made again" in caplog.text
    assert index.progress.clusters == 0
    check_as_exact(index)
    assert index.refresh() and index.progress.clusters == 10 and of_clusters(tmp_path) != [name]
    check_as_exact(index)


def test_a_killed_maker_leaves_the_exact_search(folder, make, tmp_path, caplog):
    write(folder, range(100))
    index = make(clusters_from=1000)
    index._clusters_from = FROM
    assert index._tend_clusters()
    index._maker._process.kill()
    assert index.cluster() and index.progress.clusters == 0
    assert "SIGKILL; the next start tries again" in caplog.text and len(_warned(caplog)) == 1
    check_as_exact(index)
    (tmp_path / "index-0123456789abcdef.ivf").write_bytes(b"half of it")
    (other := tmp_path / "index-1-0123456789abcdef.ivf").write_bytes(b"another server's, whose database is index-1.db")
    index = make()
    assert index.progress.clusters == 10 and len(of_clusters(tmp_path)) == 2 and other.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of a process are POSIX")
@pytest.mark.parametrize("room", [1000, 9000], ids=["soon", "at the very end"])
def test_a_full_disk_leaves_the_exact_search_and_no_file(folder, make, tmp_path, monkeypatch, caplog, room):
    resource, really = pytest.importorskip("resource"), ann.start_module
    write(folder, range(200))

    def start_module(*given, **named):
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, usual[1]))  # of a file, which a child takes over
        try:
            return really(*given, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    monkeypatch.setattr(ann, "start_module", start_module)
    index = make()
    assert index.progress.clusters == 0 and not of_clusters(tmp_path)
    assert "no clusters of the vectors could be made" in caplog.text and len(_warned(caplog)) == 1
    write(folder, range(200, 210))
    assert index.refresh() and len(_warned(caplog)) == 1, "the next start tries again"
    check_as_exact(index)
    monkeypatch.undo()
    assert make().progress.clusters == 14


def test_a_maker_that_is_ended_leaves_no_file(folder, make, tmp_path):
    write(folder, range(100))
    index = make(clusters_from=1000)
    index._clusters_from = FROM
    assert index._tend_clusters()
    index._maker._file.write_bytes(b"half of it")
    index.close()
    assert not of_clusters(tmp_path)
    make()


def test_clusters_that_were_made_and_cannot_be_read_are_not_made_again_and_again(folder, make, tmp_path, monkeypatch):
    write(folder, range(100))
    starts, really = [], ann.ClusterMaker.start

    def fail(*given):
        raise ann.ClusterError("no memory can be mapped")

    monkeypatch.setattr(ann, "Clusters", fail)
    monkeypatch.setattr(ann.ClusterMaker, "start", lambda maker: (starts.append(1), really(maker)))
    index = make()
    write(folder, range(100, 103))
    assert index.refresh() and len(starts) == 1 and index.progress.clusters == 0
    check_as_exact(index)


def test_the_file_of_clusters_is_the_owner_s_alone(folder, make, tmp_path):
    write(folder, range(100))
    make()
    (name,) = of_clusters(tmp_path)
    assert os.name == "nt" or not (tmp_path / name).stat().st_mode & 0o077


def test_an_end_of_the_work_ends_the_wait_and_no_making(folder, make):
    write(folder, range(100))
    index = make(clusters_from=1000)
    index._clusters_from = FROM
    assert not index.cluster(lambda: False) and index._maker.is_running
    assert index.refresh() and index.progress.clusters == 10


def test_without_faiss_a_line_says_what_to_do(folder, make, monkeypatch, caplog):
    write(folder, range(100))
    assert make().progress.clusters
    for module in (ann, index_module):
        monkeypatch.setattr(module, "has_faiss", lambda: False)
    index = make()
    assert index.progress.clusters == 0
    check_as_exact(index)
    assert len(_warned(caplog)) == 1 and "pip install 'slotcache[ann]'" in caplog.text
    monkeypatch.undo()
    index = make(refreshed=False)
    assert index.progress.clusters, "what there was is still there"
