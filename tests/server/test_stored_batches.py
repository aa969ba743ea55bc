"""Texts that the batches of earlier versions stored: a start names them, and a command deletes them and nothing else."""

import pytest
from slotcache.server.cli import main
from slotcache.server.config.settings import Settings
from slotcache.server.serve import prepare
from slotcache.server.stored_batches import StoredBatches
from slotcache.slots.store.private_folder import lock

from server.test_cache_command import run

ID = "0123456789abcdef" * 2
NAMES = (
    f"file-{ID[:24]}.json",
    f"file-{ID[:24]}.data",
    f"batch_{ID[:24]}.json",
    f"batch_{ID[:24]}.part",
    f".{ID[:16]}.tmp",
)
OTHERS = ("file-notes.json", f"file-{ID[:24]}.data.bak", "batch_1.json", "notes.txt")


@pytest.fixture
def root(tmp_path):
    """A cache folder as two servers of an earlier version left it: they had a folder each."""
    for name in ("files", "files-1"):
        (folder := tmp_path / name).mkdir(mode=0o700)
        for file in (*NAMES, "lock"):
            (folder / file).write_bytes(b"What a client said.")
    return tmp_path


def test_a_start_names_them_and_the_command_that_deletes_them(tiny, root, caplog):
    prepare(Settings(model=str(tiny), cache_dir=str(root)))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{root}: 10 files of /v1/files and /v1/batches" in said
    assert f"`slotcache cache prune {root} --batches`" in said
    caplog.clear()
    prepare(Settings(model=str(tiny), cache_dir=str(root / "new")))
    prepare(Settings(model=str(tiny)))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_they_are_listed_and_deleted_with_their_folders(root, capsys):
    (kv := root / "0123456789abcdef").mkdir()
    (kv / "other.kv").write_bytes(b"")
    code, out, _ = run(capsys, "list", root)
    assert code == 0 and "10 files of /v1/files and /v1/batches" in out and "prune --batches" in out
    code, out, _ = run(capsys, "prune", root, "--batches")
    assert code == 0 and out.startswith("deleted: 10 files")
    assert [path.name for path in root.iterdir()] == [kv.name] and (kv / "other.kv").exists()
    assert "/v1/files" not in run(capsys, "list", root)[1]
    assert run(capsys, "prune", root, "--batches")[1].startswith("deleted: 0 files")


def test_nothing_else_is_deleted(root, capsys):
    for name in OTHERS:
        (root / "files" / name).write_bytes(b"mine")
    assert run(capsys, "prune", root, "--batches")[0] == 0
    assert {path.name for path in (root / "files").iterdir()} == set(OTHERS) and not (root / "files-1").exists()


def test_a_link_to_a_folder_is_not_followed(root, tmp_path_factory, capsys):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (root / "files").rename(elsewhere / "files")
    (root / "files").symlink_to(elsewhere / "files")
    assert StoredBatches.of(root).num_files == len(NAMES)
    assert run(capsys, "prune", root, "--batches")[0] == 0
    assert len(list((elsewhere / "files").iterdir())) == len(NAMES) + 1


def test_a_server_of_an_earlier_version_keeps_its_own(root, capsys):
    with open(lock(root / "files" / "lock")):
        code, out, err = run(capsys, "prune", root, "--batches")
    assert code == 2 and not out and "a server of an earlier version uses this folder" in err and len(err.splitlines()) == 1
    assert all((root / "files" / name).exists() for name in NAMES)
    assert run(capsys, "prune", root, "--batches")[0] == 0


def test_one_thing_is_pruned_at_a_time(root, capsys):
    with pytest.raises(SystemExit):
        main(["cache", "prune", str(root), "--batches", "--size", "0"])
    assert "not allowed with" in capsys.readouterr().err and StoredBatches.of(root).num_files == 2 * len(NAMES)
