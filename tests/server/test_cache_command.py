"""`slotcache cache`: what it tells of a folder, what it deletes, and what it carries from one machine to another."""

import io
import os
import random
import re
import tarfile
import time

import msgspec
import numpy as np
import pytest
from slotcache.server.cli import main
from slotcache.slots.record import Record, file_name
from slotcache.slots.scope import Scope
from slotcache.slots.store.archive import MANIFEST, ArchiveError, Manifest, Origin, import_archive, read_origin, write_origin
from slotcache.slots.store.disk import ORIGIN, DiskTier
from slotcache.slots.store.record_file import Provenance, encode, read
from support.mutation import cases, forged, mutated
from support.record_files import head_of, resealed, split

from server.conftest import REST, running
from server.engine.test_disk import BODY, cached, files, settled

HERE = Provenance("0" * 32, "1" * 32)
ORIGIN_HERE = Origin(model="tiny.gguf", build="b1", machine="2" * 32, shape="3" * 32)
DAY = 86_400


def record(first, start=0, stop=10, scope="", worth=1.0, size=1000):
    tokens = np.arange(first, first + stop, dtype=np.int32)
    data = np.full(size, 1 + first % 251, np.uint8)
    return Record(Scope.shared(scope), tokens, start, data, token_cost=worth)


def fill(root, *given, made_by=HERE):
    disk = DiskTier(root, 1 << 30, made_by)
    for one in given:
        assert disk.put(one)
    disk.close()
    write_origin(root / made_by.folder, ORIGIN_HERE)
    return files(root)


def run(capsys, *arguments):
    """The exit code, and what is printed on each stream."""
    code = main(["cache", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refusal(capsys, *arguments):
    """The one line with which something is refused."""
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out and len(err.splitlines()) == 1 and err.startswith("slotcache: "), (code, out, err)
    return err


# ---- list, verify, prune ------------------------------------------------------------------------------------------------


def test_list_reports_scopes_tokens_bytes_and_the_model(tmp_path, capsys):
    found = fill(tmp_path, record(0), record(0, 10, 25), record(100, scope="a\x1b[31m"))
    code, out, _ = run(capsys, "list", tmp_path)
    assert code == 0 and "tiny.gguf, b1" in out and HERE.folder in out and "\x1b" not in out
    common, named = (line.split() for line in out.splitlines()[2:4])
    assert common[:3] == ["(common)", "2", "25"] and named[:3] == ['"a\\u001b[31m"', "1", "10"]
    assert out.splitlines()[-1].startswith(f"3 records, {sum(one.stat().st_size for one in found) / 2**20:.1f} MiB")


def test_verify_names_what_is_damaged_and_deletes_nothing(tmp_path, capsys):
    found = fill(tmp_path, *(record(100 * number) for number in range(4)))
    assert run(capsys, "verify", tmp_path)[:2] == (0, "4 records, 0 damaged\n")
    content = found[1].read_bytes()
    found[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found[2].write_bytes(b"junk")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1 and out.splitlines()[-1] == "4 records, 2 damaged" and files(tmp_path) == found
    assert f"{found[1]}: its checksum is wrong" in out and str(found[2]) in out


def test_prune_to_a_size_keeps_what_is_worth_most_and_prefixes_last(tmp_path, capsys):
    given = [record(0), record(0, 10, 20, worth=9.0), record(100, worth=2.0), record(200, worth=1.5)]
    fill(tmp_path, *(record(300, worth=0.5, size=1 << 20), *given))
    (one,) = {path.stat().st_size >> 10 for path in files(tmp_path) if path.stat().st_size < 1 << 20}
    assert one == 1
    code, out, _ = run(capsys, "prune", tmp_path, "--size", "1")
    assert code == 0 and out.startswith("1 records deleted, 1.0 MiB; 4 are left")
    assert {path.name for path in files(tmp_path)} == {file_name(one) for one in given}
    assert run(capsys, "prune", tmp_path, "--size", "0")[0] == 0 and not files(tmp_path)


def test_prune_of_what_is_unused_keeps_the_prefixes_of_what_is_used(tmp_path, capsys):
    begins, used, unused = record(0), record(0, 10, 20), record(100)
    fill(tmp_path, begins, used, unused)
    old = time.time() - 10 * DAY
    for one in (begins, unused):
        os.utime(tmp_path / HERE.folder / file_name(one), (old, old))
    assert run(capsys, "prune", tmp_path, "--unused", "20")[0] == 0 and len(files(tmp_path)) == 3
    assert run(capsys, "prune", tmp_path, "--unused", "5")[0] == 0
    assert {path.name for path in files(tmp_path)} == {file_name(begins), file_name(used)}


def test_a_server_goes_on_beside_a_prune_and_an_import(tiny, tmp_path, capsys):
    with running(tiny, cache_dir=str(tmp_path)) as up:
        first = up.chat(**BODY)
        settled(up)
        assert run(capsys, "export", tmp_path, "-o", tmp_path / "kv.tar")[0] == 0
        assert run(capsys, "prune", tmp_path, "--size", "0")[0] == 0 and not files(tmp_path)
        assert run(capsys, "import", tmp_path / "kv.tar", tmp_path)[0] == 0
        assert up.chat(**BODY)["choices"] == first["choices"]
        up.chat("Another one.")
        settled(up)
    with running(tiny, cache_dir=str(tmp_path)) as up:
        again = up.chat(**BODY)
        assert again["slotcache"]["source"] == "disk" and again["choices"] == first["choices"]


def test_a_folder_that_is_none_is_one_line(tmp_path, capsys):
    for command in ("list", "verify"):
        assert "no such folder" in refusal(capsys, command, tmp_path / "none")
    assert "nothing to export" in refusal(capsys, "export", tmp_path, "-o", tmp_path / "kv.tar")


# ---- export and import --------------------------------------------------------------------------------------------------


@pytest.fixture
def carried(tiny, tmp_path, capsys):
    """An archive of what a server has computed, with the answer; a scope with a name is not in it."""
    folder, archive = tmp_path / "there", tmp_path / "kv.tar"
    with running(tiny, cache_dir=str(folder)) as up:
        first = up.chat(**BODY)
        up.chat(**BODY | {"cache_scope": "private"})
    return folder, archive, first


def test_an_export_is_found_by_a_server_elsewhere(tiny, tmp_path, carried, capsys):
    there, archive, first = carried
    before = {path: path.read_bytes() for path in files(there)}
    code, out, _ = run(capsys, "export", there, "-o", archive)
    assert code == 0 and f"{len(before) // 2} records" in out and archive.stat().st_mode & 0o777 == 0o600
    assert {path: path.read_bytes() for path in files(there)} == before, "nothing is deleted"
    assert b"private" not in archive.read_bytes()
    here = tmp_path / "here"
    assert run(capsys, "import", archive, here)[0] == 0
    assert run(capsys, "import", archive, here)[1].startswith("0 records of")
    assert run(capsys, "verify", here)[0] == 0
    with running(tiny, cache_dir=str(here)) as up:
        again = up.chat(**BODY)
        assert again["slotcache"]["source"] == "disk" and cached(again) == again["usage"]["prompt_tokens"] - REST
        assert again["choices"] == first["choices"]
        assert cached(up.chat(**BODY | {"cache_scope": "private"})) == 0


def test_kv_of_another_machine_is_taken_only_when_asked_for_and_reported(tiny, tmp_path, carried, capsys):
    there, archive, first = carried
    (folder,) = {path.parent for path in files(there)}
    origin = read_origin(folder)
    assert origin is not None
    (folder / ORIGIN).write_bytes(msgspec.json.encode(msgspec.structs.replace(origin, machine="0" * 32, build="b0, a VAX")))
    assert run(capsys, "export", there, "-o", archive)[0] == 0
    here = tmp_path / "here"
    assert "b0, a VAX" in (said := refusal(capsys, "import", archive, here)) and "--import-foreign" in said
    assert not files(here)
    code, out, _ = run(capsys, "import", archive, here, "--import-foreign")
    assert code == 0 and "as imported" in out
    (foreign,) = {path.parent for path in files(here)}
    with running(tiny, cache_dir=str(here)) as up:
        again = up.chat(**BODY)
        assert again["slotcache"]["source"] == "imported" and again["choices"] == first["choices"]
        assert up.metric("slotcache_cached_tokens_total", source="imported") > 100
        up.chat("A question of the common scope, which may stand on it.")
        up.chat("A question of another scope.", cache_scope="own")
        settled(up)
        own = {path for path in files(here) if path.parent != foreign}
    _, out, _ = run(capsys, "list", here)
    assert "imported" in out and len(own) > 0
    assert all(b'"scope":"own"' in path.read_bytes()[:1000] for path in own), "what may stand on it is kept with it"
    with running(tiny, cache_dir=str(here)) as up:
        later = up.chat("A question of the common scope, which may stand on it.")
        assert later["slotcache"]["source"] == "imported"


def test_of_several_models_one_has_to_be_chosen(tmp_path, capsys):
    there, archive, other = tmp_path / "there", tmp_path / "kv.tar", Provenance("5" * 32, "1" * 32)
    fill(there, record(0))
    fill(there, record(0), record(100), made_by=other)
    said = refusal(capsys, "export", there, "-o", archive)
    assert HERE.folder in said and other.folder in said and not archive.exists()
    assert run(capsys, "export", there, "-o", archive, "--of", other.folder)[1].startswith("2 records")


def test_a_damaged_record_is_left_out_of_an_export(tmp_path, capsys):
    found = fill(tmp_path / "there", record(0), record(100))
    found[0].write_bytes(found[0].read_bytes()[:-1] + b"\0")
    _, out, _ = run(capsys, "export", tmp_path / "there", "-o", tmp_path / "kv.tar")
    assert out.startswith("1 records") and "1 damaged records are left out" in out


# ---- archives that no export writes -------------------------------------------------------------------------------------


def archive_of(path, members, cut=None):
    """Write a tar of members: (name, content, changed fields of its header)."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content))
    path.chmod(0o600)
    if cut is not None:
        path.write_bytes(path.read_bytes()[:cut])


def file_of(one, made_by=HERE):
    return b"".join(bytes(part) for part in encode(one, made_by))


def manifest_of(*contents, **changed):
    fields = {"format": 3, "model": HERE.model, "settings": HERE.settings, "origin": ORIGIN_HERE}
    fields |= {"records": len(contents), "bytes": sum(map(len, contents))}
    return msgspec.json.encode(Manifest(**fields | changed))


RECORD, OTHER = record(0), record(0, scope="private")
GOOD, NAME = file_of(RECORD), file_name(RECORD)
FORGED = GOOD[:-1] + b"\0"
LAST = (MANIFEST, manifest_of(GOOD), {})
HOSTILE = {
    "an absolute name": [("/" + NAME, GOOD, {}), LAST],
    "a way out": [("../../" + NAME, GOOD, {}), LAST],
    "a folder": [("x/" + NAME, GOOD, {}), LAST],
    "another name": [("0" * 32 + ".kv", GOOD, {}), LAST],
    "a symbolic link": [(NAME, b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), LAST],
    "a hard link": [(NAME, b"", {"type": tarfile.LNKTYPE, "linkname": MANIFEST}), LAST],
    "a device": [(NAME, b"", {"type": tarfile.CHRTYPE}), LAST],
    "a pipe": [(NAME, b"", {"type": tarfile.FIFOTYPE}), LAST],
    "a sparse bomb": [(NAME, GOOD, {"type": tarfile.GNUTYPE_SPARSE}), LAST],
    "a long name": [(NAME, GOOD, {"type": tarfile.GNUTYPE_LONGNAME}), LAST],
    "a mode": [(NAME, GOOD, {"mode": 0o4755}), LAST],
    "a damaged record": [(NAME, FORGED, {}), LAST],
    "a record that is cut": [(NAME, GOOD[:-9], {}), (MANIFEST, manifest_of(GOOD[:-9]), {})],
    "a private scope": [(file_name(OTHER), file_of(OTHER), {}), (MANIFEST, manifest_of(file_of(OTHER)), {})],
    "another model": [(NAME, GOOD, {}), (MANIFEST, manifest_of(GOOD, model="9" * 32), {})],
    "another format": [(NAME, GOOD, {}), (MANIFEST, manifest_of(GOOD, format=2), {})],
    "twice": [(NAME, GOOD, {}), (NAME, GOOD, {}), (MANIFEST, manifest_of(GOOD, GOOD), {})],
    "more than it says": [(NAME, GOOD, {}), (MANIFEST, manifest_of(), {})],
    "no manifest": [(NAME, GOOD, {})],
    "junk for a manifest": [(NAME, GOOD, {}), (MANIFEST, b"[" * 60_000, {})],
    "something behind it": [LAST, (NAME, GOOD, {})],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_one_line_and_leaves_nothing(tmp_path, capsys, name):
    archive_of(tmp_path / "kv.tar", HOSTILE[name])
    refusal(capsys, "import", tmp_path / "kv.tar", tmp_path / "here", "--import-foreign")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("size", [1 << 40, (1 << 63) - 1])
def test_a_size_that_lies_takes_no_memory(tmp_path, capsys, size):
    archive_of(tmp_path / "kv.tar", [(NAME, GOOD, {}), LAST])
    content = (tmp_path / "kv.tar").read_bytes()
    info = tarfile.TarInfo.frombuf(content[:512], "ascii", "strict")
    info.size = size
    (tmp_path / "kv.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + content[512:])
    assert "the archive ends before" in refusal(capsys, "import", tmp_path / "kv.tar", tmp_path / "here")


@pytest.mark.parametrize("cut", [0, 100, 512, 900, 2048])
def test_an_archive_that_is_cut_is_refused(tmp_path, capsys, cut):
    archive_of(tmp_path / "kv.tar", [(NAME, GOOD, {}), LAST], cut)
    refusal(capsys, "import", tmp_path / "kv.tar", tmp_path / "here", "--import-foreign")


def takes(folder, name):
    """Whether the archive is taken; else it is refused in one line."""
    try:
        import_archive(folder / "kv.tar", folder / name, "2" * 32, True, lambda done, total: None)
    except ArchiveError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def test_a_mutated_archive_is_refused_or_has_what_was_exported(tmp_path):
    archive_of(tmp_path / "kv.tar", [(NAME, GOOD, {}), LAST])
    content = (tmp_path / "kv.tar").read_bytes()
    for number in range(cases(100, 0.1)):
        (tmp_path / "kv.tar").write_bytes(mutated(content, random.Random(number)))
        if takes(tmp_path, str(number)):
            (path,) = files(tmp_path / str(number))
            with path.open("rb") as file:
                kept = read(file, path.stat().st_size, Provenance(HERE.model, split(path)["settings"]))
            assert file_name(kept) == NAME and kept.data.tobytes() == RECORD.data.tobytes()


def test_a_forged_record_is_taken_or_refused_and_never_more(tmp_path):
    for number in range(cases(100, 0.1)):
        content = forged(GOOD, random.Random(number))
        archive_of(tmp_path / "kv.tar", [(NAME, content, {}), (MANIFEST, manifest_of(content), {})])
        if takes(tmp_path, str(number)):
            assert len(files(tmp_path / str(number))) == 1


def boasting(uses=(1 << 53) - 1, token_cost=1e6):
    """The file of a record that says how much it is worth."""
    head = msgspec.json.decode(head_of(GOOD)) | {"frequency": uses, "token_cost": token_cost}
    return resealed(GOOD, msgspec.json.encode(head))


@pytest.mark.parametrize(("cost", "kept"), [(1e6, 1.0), (0.25, 0.25)])
@pytest.mark.parametrize("machine", ["2" * 32, "4" * 32])
def test_what_an_archive_says_of_the_worth_of_a_record_does_not_count(tmp_path, machine, cost, kept):
    content = boasting(token_cost=cost)
    archive_of(tmp_path / "kv.tar", [(NAME, content, {}), (MANIFEST, manifest_of(content), {})])
    imported = import_archive(tmp_path / "kv.tar", tmp_path, machine, True, lambda done, total: None)
    head = split(imported.folder / NAME)
    assert (head["frequency"], head["token_cost"]) == (1, kept)


def test_a_record_that_was_used_very_often_is_carried_whole(tmp_path, capsys):
    (path,) = fill(tmp_path / "there", RECORD)
    path.write_bytes(boasting())
    _, out, _ = run(capsys, "export", tmp_path / "there", "-o", tmp_path / "kv.tar")
    assert out.startswith("1 records")
    assert takes(tmp_path, "here")


@pytest.mark.parametrize("wrong", ["-1", "9007199254740992", "1.5", "1e999", "null"])
@pytest.mark.parametrize("field", ["frequency", "token_cost", "start", "size"])
def test_a_record_whose_numbers_are_none_is_refused(tmp_path, field, wrong):
    head = re.sub(rb'"%b":[0-9.]+' % field.encode(), b'"%b":%b' % (field.encode(), wrong.encode()), head_of(GOOD))
    content = resealed(GOOD, head)
    archive_of(tmp_path / "kv.tar", [(NAME, content, {}), (MANIFEST, manifest_of(content), {})])
    assert takes(tmp_path, "here") == (field == "token_cost" and wrong == "1.5")


def test_an_archive_that_others_may_change_and_a_link_are_refused(tmp_path, capsys):
    archive_of(tmp_path / "kv.tar", [(NAME, GOOD, {}), LAST])
    (tmp_path / "kv.tar").chmod(0o666)
    assert "chmod go-w" in refusal(capsys, "import", tmp_path / "kv.tar", tmp_path / "here", "--import-foreign")
    (tmp_path / "kv.tar").chmod(0o600)
    (tmp_path / "link.tar").symlink_to(tmp_path / "kv.tar")
    assert "it is a link" in refusal(capsys, "import", tmp_path / "link.tar", tmp_path / "here", "--import-foreign")
    os.mkfifo(tmp_path / "pipe")
    assert "it is not a file" in refusal(capsys, "import", tmp_path / "pipe", tmp_path / "here")
    assert run(capsys, "import", tmp_path / "kv.tar", tmp_path / "here", "--import-foreign")[0] == 0
