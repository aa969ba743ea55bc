"""`slotcache models`: what it tells of each model that serve would have, and what it deletes."""

import json
import shutil

import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models.model_files import digest, files_of
from slotcache.server.cli import main
from slotcache.slots.store.archive import StoredFolder, folders, records
from slotcache.slots.store.disk import DiskTier
from support.encoders import bert

from server.conftest import until
from server.service.test_models import QUESTION, cached, sharing


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("listed")
    return [generate(folder / f"{name}.gguf", SHAPES["tiny"], seed=seed) for seed, name in enumerate("ab", 11)]


@pytest.fixture(scope="module")
def store(files, tmp_path_factory):
    """A --cache-dir with KV of both models."""
    folder = tmp_path_factory.mktemp("store")
    fill(files, folder)
    return folder


def fill(files, folder):
    with sharing(files, cache_dir=str(folder)) as up:
        for name in "ab":
            up.chat(QUESTION, model=name)
        tiers = [tier for one in up.host.services for tier in one.tiers if isinstance(tier, DiskTier)]
        until(lambda: all(tier.idle and tier.index.entries for tier in tiers))


def run(capsys, *arguments):
    """The exit code, and what is printed on each stream."""
    code = main(["models", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def listed(capsys, *flags):
    code, out, _ = run(capsys, "list", "--json", *flags)
    assert code == 0
    return {one["name"]: one for one in json.loads(out)}


def test_list_reports_each_model_and_its_kv(files, store, capsys):
    flags = ("--models_dir", files[0].parent, "--cache-dir", store)
    found = listed(capsys, *flags)
    assert list(found) == ["a", "b"]
    for one, file in zip(found.values(), files, strict=True):
        assert one["file"] == str(file) and one["size"] == file.stat().st_size and one["architecture"] == "llama"
        assert (
            one["context"] == one["context_train"] > 0 and one["kv_tokens"] > 10 and one["kv_bytes"] > 0 < one["kv_records"]
        )
    code, out, _ = run(capsys, "list", *flags)
    head, a, b = out.splitlines()
    assert code == 0 and head.split()[:2] == ["model", "architecture"] and a.split()[0] == "a" and b.endswith(str(files[1]))
    assert listed(capsys, "-m", files[0], "--ctx-size", 512)["a"]["context"] == 512
    assert listed(capsys, "-m", f"x={files[0]}")["x"]["kv_records"] == 0


def test_show_reports_how_a_model_fits(files, store, capsys):
    code, out, _ = run(capsys, "show", "-m", files[0], "-m", files[1], "--cache-dir", store, "b")
    assert code == 0 and out.startswith("b: ") and "bytes a token" in out and "cells (-c)" in out and f"KV in {store}" in out
    code, out, err = run(capsys, "show", "d", "-m", files[0])
    assert code == 2 and not out and err == "slotcache: no model 'd' is served here: expected a\n"


def test_a_file_that_cannot_be_served_says_why(files, tmp_path, capsys):
    (tmp_path / "broken.gguf").write_bytes(files[0].read_bytes()[:5000])
    bert(tmp_path / "encoder.gguf")
    found = listed(capsys, "--models-dir", tmp_path)
    assert found["broken"]["problem"] and not found["broken"]["context"]
    assert "generates no text" in found["encoder"]["problem"] and found["encoder"]["architecture"] == "bert"
    assert run(capsys, "list", "--models-dir", tmp_path / "none")[0] == 2


def test_the_kv_of_one_model_is_removed_beside_a_server(files, store, capsys):
    flags = ("-m", files[0], "-m", files[1])
    assert "--cache-dir" in run(capsys, "remove-kv", "a", *flags)[2]
    with sharing(files, cache_dir=str(store)) as up:
        before = listed(capsys, *flags, "--cache-dir", store)
        code, out, _ = run(capsys, "remove-kv", "a", *flags, "--cache-dir", store)
        assert code == 0 and out.startswith(f"{before['a']['kv_records']} records deleted")
        after = listed(capsys, *flags, "--cache-dir", store)
        assert after["a"]["kv_records"] == 0 and after["b"]["kv_records"] == before["b"]["kv_records"]
        assert cached(up.chat(QUESTION, model="a")) == 0


def test_a_stray_file_does_not_make_a_folder_anothers(files, store, capsys):
    flags = ("-m", files[0], "-m", files[1], "--cache-dir", store)
    fill(files, store)
    before = listed(capsys, *flags)
    folder_of = {one.model: one.path for one in map(StoredFolder.of, folders(store))}
    a, b = (folder_of[digest(files_of(file))] for file in files)
    stray = a / f"z{next(records(b)).path.name}"
    shutil.copy(next(records(b)).path, stray)
    code, _, _ = run(capsys, "remove-kv", "b", *flags)
    stray.unlink()
    assert code == 0 and listed(capsys, *flags)["a"]["kv_records"] == before["a"]["kv_records"]


def test_what_cannot_be_deleted_does_not_count(files, store, capsys):
    flags = ("-m", files[0], "-m", files[1], "--cache-dir", store)
    fill(files, store)
    num_records = listed(capsys, *flags)["a"]["kv_records"]
    (folder,) = (one.path for one in map(StoredFolder.of, folders(store)) if one.model == digest(files_of(files[0])))
    taken = folder / f"held{next(records(folder)).path.suffix}"
    taken.mkdir()
    code, out, _ = run(capsys, "remove-kv", "a", *flags, "--json")
    taken.rmdir()
    assert code == 0 and json.loads(out)["records"] == num_records > 0
