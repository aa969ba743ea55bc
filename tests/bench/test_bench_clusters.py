"""The bench of vectors in clusters, with few: what it measures, not how fast that is."""

import numpy as np
import pytest
from slotcache.bench.offline.vector_clusters import measure_clusters
from slotcache.retrieval.ranking import unit

pytest.importorskip("faiss", reason="pip install 'slotcache[ann]'")


def test_searches_in_clusters_stand_beside_exact_ones(tmp_path) -> None:
    passages = unit(np.random.default_rng(2).standard_normal((30, 16)))
    report = measure_clusters(2000, passages, passages[:20], tmp_path)
    (table,) = report.tables
    assert [row[0] for row in table.rows] == [
        "all",
        "clusters",
    ] and "2,000 vectors of 16, 44 clusters, 20 queries" in table.title
    assert [bar.number for bar in report.bars] == [1, 2, 3, 4, 5, 6]
    recall, first, shown, *_ = (bar.measured for bar in report.bars)
    assert 0.3 < recall <= 1 and 0 < first < 1 and 0 <= shown <= 1
