"""A server of the embedded model, as the documents have it: with the default settings, on another port."""

import pytest
from server.conftest import running
from slotcache.models.demo import FILE


@pytest.fixture(scope="package")
def demo_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    (folder / "notes.md").write_text("# Report\n\nA report says it all.")
    with running(FILE, flash_attn="auto", idle_prefill=True, docs=str(folder), docs_db=str(folder / "db")) as up:
        yield up
