"""The index of a folder of notes, which a test opens again and again."""

import pytest
from slotcache.retrieval import Embedder, Index


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "notes"
    path.mkdir()
    return path


@pytest.fixture
def make(folder, tmp_path):
    """Opens the index of the folder, closes the one before, and the last one at the end."""
    opened = []

    def open_index(embed=None, name="letters", **options):
        for index in opened:
            index.close()
        opened[:] = [Index([folder], tmp_path / "index.db", embedder=Embedder(name, embed) if embed else None, **options)]
        return opened[0]

    yield open_index
    for index in opened:
        index.store.check()
        index.close()
