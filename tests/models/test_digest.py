"""A digest of every byte, read once, tells one model from another."""

import os

import pytest
from gguf import GGUFReader
from slotcache.models import model_files as module
from slotcache.models.errors import ModelError
from slotcache.models.model import Model
from slotcache.models.model_files import cache_folder, digest, files_of, keep
from support.parts import split


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slotcache" / "digests"


@pytest.fixture
def reads(monkeypatch):
    """The files that were read, one entry for each chunk."""
    found: list = []
    chunk = module._chunk
    monkeypatch.setattr(module, "_chunk", lambda path, at: found.append(path) or chunk(path, at))
    return found


def test_every_byte_of_a_large_file_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1 << 20)
    path, seen = tmp_path / "model.gguf", set()
    size = (5 << 20) + 17
    places = (*range(0, size, 250_000), size - 1)
    for at in places:
        content = bytearray(size)
        content[at] = 1
        path.write_bytes(content)
        seen.add(digest([path]))
    assert len(seen) == len(places)


def test_models_that_differ_in_one_tensor_differ(tiny, tmp_path):
    found = {Model(tiny).digest()}
    for tensor in GGUFReader(tiny).tensors:
        content = bytearray(tiny.read_bytes())
        content[tensor.data_offset + tensor.n_bytes // 2] ^= 1
        other = tmp_path / "other.gguf"
        other.write_bytes(content)
        found.add(digest([other]))
    assert len(found) == 1 + len(GGUFReader(tiny).tensors)


def test_a_file_is_read_once_until_it_changes(tmp_path, reads, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = digest([path])
    assert digest([path]) == first and len(reads) == 1
    times = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same inode, size and mtime
    assert digest([path]) != first and len(reads) == 2
    assert {one.stat().st_mode & 0o777 for one in (cache,)} == {0o700}


def test_a_damaged_note_is_not_believed(tmp_path, reads, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    first = digest([path])
    for content in (b"", b"zz", first.encode()[:31], first.upper().encode() + b"\n", os.urandom(64)):
        (note,) = cache.iterdir()
        note.write_bytes(content)
        assert digest([path]) == first
    assert len(reads) == 6


def test_notes_do_not_pile_up(tmp_path, cache):
    path = tmp_path / "model.gguf"
    for number in range(80):
        path.write_bytes(b"x" * number)
        digest([path])
    assert len(list(cache.iterdir())) == module.MOST_KEPT


def test_without_a_cache_directory_it_is_computed_each_time(tmp_path, reads, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    assert digest([path]) == digest([path]) and len(reads) == 2


def test_a_user_without_a_home_has_no_cache_directory(tmp_path, reads, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")  # as for a container's user who is in no list of users

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(module.Path, "home", no_home)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"one")
    assert digest([path]) == digest([path]) and len(reads) == 2
    assert not cache_folder().exists()


def test_what_cannot_be_kept_leaves_no_file(cache):
    (cache / "taken").mkdir(parents=True)
    with pytest.raises(OSError):
        keep(cache / "taken", "text")
    assert [one.name for one in cache.iterdir()] == ["taken"]


def test_all_parts_of_a_split_model_count(tiny, tmp_path):
    first = split(tiny, tmp_path / "model.gguf")
    parts = files_of(first)
    assert len(parts) > 2
    model = Model(first)
    whole = model.digest()
    model.close()
    for part in parts:
        content = part.read_bytes()
        part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert digest(files_of(first)) != whole
        part.write_bytes(content)
    assert digest(files_of(first)) == whole


def test_a_model_that_changed_since_it_was_loaded_is_refused(tiny, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.read_bytes())
    model = Model(path)
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny.read_bytes())
    other.replace(path)
    with pytest.raises(ModelError, match="changed since it was loaded"):
        model.digest()
    model.close()
