"""The files of a folder: each is found, or has a reason why it is not read. No way leads out of the folder."""

import os
import socket

import pytest
from slotcache.retrieval.files import FoundFile, SkippedFile, folders_of, read_bytes, walk


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_a_closed_folder_has_a_reason(folder):
    write(folder / "shut" / "a.txt")
    (folder / "shut").chmod(0)
    assert found(folder) == {"shut": "it cannot be opened: Permission denied"}


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
