"""Where the index of documents stands: in the user's cache, or, without one, in a folder that ends with the process."""

import os
import signal
import subprocess
import sys

import httpx
import pytest
from slotcache.models.model_files import CACHE_REMEDY
from slotcache.server.config.settings import Settings
from slotcache.server.search.folder import index_folder
from slotcache.slots.store.private_folder import FolderError

from server.conftest import DEADLINE, free_port
from server.test_cli import command, run, wait_until_ready


def test_a_folder_that_is_named_has_to_be_usable(tmp_path):
    (file := tmp_path / "file").write_text("no folder")
    assert index_folder(Settings(docs_db=str(tmp_path / "db"))) == tmp_path / "db"
    with pytest.raises(FolderError, match="expected a folder to write to"):
        index_folder(Settings(docs_db=str(file)))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is no home for anybody")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_without_a_home_the_folder_ends_with_the_server(tiny, tmp_path, end):
    (tmp_path / "note.txt").write_text("The mill was built in 1900.")
    places = {"HOME": "/proc", "XDG_CACHE_HOME": "", "TMPDIR": str(tmp_path)}
    port = free_port()
    serving = command("serve", "-m", tiny, "--port", port, "-c", 512, "-t", 1, "--docs", tmp_path / "note.txt")
    process = subprocess.Popen(serving, env=os.environ | places, stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(process, port)
        (folder,) = tmp_path.glob("slotcache-*")
        assert httpx.get(f"http://127.0.0.1:{port}/v1/sources", timeout=DEADLINE).json()["collections"]
        process.send_signal(end)
        _, log = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert f"is in {folder} until the server ends: --docs-db PATH keeps it, or {CACHE_REMEDY}" in log
    assert "the cache folder /proc/.cache/slotcache/docs: " in log and "--docs-db /proc" not in log
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is no home for anybody")
@pytest.mark.parametrize("arguments", [("serve", "-m", "smollm2"), ("demo", "--page")])
def test_without_a_home_an_error_names_the_variable_that_helps(arguments):
    process = run(*arguments, HOME="/proc", XDG_CACHE_HOME="")
    assert process.returncode and f"'/proc/.cache': {CACHE_REMEDY}" in process.stderr
