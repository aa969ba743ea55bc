"""The files of a folder: each is found, or has a reason why it is not read. No way leads out of the folder."""

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from slotcache.retrieval import Index
from slotcache.retrieval.files import FoundFile, SkippedFile, directories, folders_of, read_bytes, walk

NOBODY = 65534  # the user without rights of its own


def found(*paths):
    """Each file by its path: True, or the reason why it is not read."""
    files = [file for folder in folders_of(list(paths)) for file in walk(folder)]
    return {file.path: file.reason if isinstance(file, SkippedFile) else True for file in files}


def write(path, data=b"text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "notes"


@pytest.fixture
def ordinary():
    """A folder of an ordinary user, who the test runs as: root may open everything."""
    is_root = os.geteuid() == 0
    with TemporaryDirectory() as name:
        if is_root:
            os.chown(name, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


def test_each_file_is_found_or_has_a_reason(folder, tmp_path):
    secret = write(tmp_path / "secret" / "key.txt").parent
    write(folder / "a.md")
    write(folder / "sub" / "deep" / "b.txt")
    write(folder / "empty.txt", b"")
    write(folder / ".hidden" / "c.txt")
    write(folder / "bell\x07.txt")
    write(folder / "line\nbreak.txt")
    write(folder / "ünï語.txt")
    with open(os.fsencode(folder) + b"/bytes\xff.txt", "wb") as file:
        file.write(b"text")
    with open(folder / "large.txt", "wb") as file:
        file.truncate(1 << 30)
    (folder / "out").symlink_to(secret)
    (folder / "key.txt").symlink_to(secret / "key.txt")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as plug:
        plug.bind(str(folder / "plug"))
    control = "its name has control characters or is not UTF-8"
    assert found(folder) == {
        "a.md": True,
        "sub/deep/b.txt": True,
        "ünï語.txt": True,
        "empty.txt": "it is empty",
        ".hidden": "its name begins with a dot",
        "bell\\x07.txt": control,
        "line\\nbreak.txt": control,
        "bytes\\udcff.txt": control,
        "large.txt": "it has 1,024 MiB: at most 64 are read",
        "out": "it is a link: links are not followed",
        "key.txt": "it is a link: links are not followed",
        "loop": "it is a link: links are not followed",
        "pipe": "it is not a regular file",
        "plug": "it is not a regular file",
    }


def test_several_folders_have_names_and_a_file_may_be_one(folder, tmp_path):
    one, other = write(folder / "a.txt"), write(tmp_path / "old" / "notes" / "a.txt")
    assert found(folder) == {"a.txt": True} == found(one)
    assert found(folder, other.parent, folder, one) == {"notes/a.txt": True, "notes-2/a.txt": True, "a.txt/a.txt": True}
    with pytest.raises(FileNotFoundError):
        folders_of([tmp_path / "none"])


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o644, 0o311])
def test_a_folder_that_cannot_be_listed_or_entered_has_a_reason(ordinary, mode):
    """Mode 644 lists the names, and says nothing of the files."""
    folder = ordinary / "notes"
    for name in ("a.txt", "shut/b.txt", "shut/deeper/c.txt", "z.txt"):
        write(folder / name)
    (folder / "shut").chmod(mode)
    database, (whole,) = ordinary / "index.db", folders_of([folder])
    try:
        assert found(folder) == {"a.txt": True, "shut": "it cannot be opened: Permission denied", "z.txt": True}
        assert [*directories(whole)] == [folder], "what cannot be opened is not watched"
        index = Index([folder], database)
        scan = index.scan()
        index.close()
        assert [file.path for file in scan.changed] == ["a.txt", "z.txt"]
        assert [file.path for file in scan.skipped] == ["shut"]
    finally:
        (folder / "shut").chmod(0o755)


def test_one_file_is_watched_without_what_lies_beside_it(folder):
    file = write(folder / "a.txt")
    write(folder / "sub" / "b.txt")
    assert [*directories(folders_of([file])[0])] == [folder]


def test_escapes_are_not_mistaken_for_letters(folder):
    for name in (rb"a\udcff.md", b"a\xff.md", rb"b\x07.md", b"b\x07.md", rb"c\\udcff.md"):
        write(folder / os.fsdecode(name))
    control = "its name has control characters or is not UTF-8"
    assert found(folder) == {
        r"a\\udcff.md": True,
        r"a\udcff.md": control,
        r"b\\x07.md": True,
        r"b\x07.md": control,
        r"c\\\\udcff.md": True,
    }


def test_a_link_that_comes_between_is_not_followed(folder, tmp_path):
    write(tmp_path / "secret" / "b.txt")
    write(folder / "sub" / "b.txt")
    (file,) = walk(folders_of([folder])[0])
    assert isinstance(file, FoundFile) and read_bytes(str(folder), file.parts) == b"text"
    (folder / "sub").rename(folder / "was")
    (folder / "sub").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        read_bytes(str(folder), file.parts)
    (folder / "sub").unlink()
    (folder / "was").rename(folder / "sub")
    (folder / "sub" / "b.txt").unlink()
    (folder / "sub" / "b.txt").symlink_to(tmp_path / "secret" / "b.txt")
    with pytest.raises(OSError):
        read_bytes(str(folder), file.parts)
    (folder / "sub" / "b.txt").unlink()
    os.mkfifo(folder / "sub" / "b.txt")
    with pytest.raises(OSError, match="regular"):
        read_bytes(str(folder), file.parts)
