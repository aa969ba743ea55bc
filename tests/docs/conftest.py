"""A server of the embedded model, as the documents have it: with the default settings, on another port."""

import pytest
from server.conftest import running
from slotcache.models.demo import FILE


@pytest.fixture(scope="package")
def demo_server():
    with running(FILE, flash_attn="auto", idle_prefill=True) as up:
        yield up
