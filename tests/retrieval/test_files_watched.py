"""Notice of changes: of files in old and new folders, and of nothing behind a link."""

from queue import Empty, Queue
from threading import Event, Thread

import pytest
from slotcache.retrieval import changes
from slotcache.retrieval.files import folders_of

PATIENCE = 300.0  # seconds: only what never comes about takes as long, also on a busy machine


@pytest.fixture
def notices(tmp_path):
    folder, stop, found = tmp_path / "notes", Event(), Queue()
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (folder / "link").symlink_to(tmp_path / "outside")

    def watch():
        for _ in changes(folders_of([folder]), stop):
            found.put(True)

    thread = Thread(target=watch)
    thread.start()
    yield found
    stop.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_changes_are_noticed(notices, tmp_path):
    folder = tmp_path / "notes"
    assert notices.get(timeout=PATIENCE)  # at the start
    (folder / "sub" / "a.txt").write_text("one")
    assert notices.get(timeout=PATIENCE)
    (folder / "new").mkdir()
    assert notices.get(timeout=PATIENCE)
    (folder / "new" / "b.txt").write_text("two")
    assert notices.get(timeout=PATIENCE)
    assert not all(notices_outside(notices, tmp_path / "outside" / "c.txt") for _ in range(5))
    (folder / "new" / "d.txt").write_text("four")
    assert notices.get(timeout=PATIENCE)


def notices_outside(notices, file):
    """Whether a notice comes after a change outside. One of an earlier change may be late, and come, too."""
    while has_notice(notices):
        pass
    file.write_text("three")
    return has_notice(notices)


def has_notice(notices):
    """Whether a notice comes within a while."""
    try:
        return notices.get(timeout=0.7)
    except Empty:
        return False
