"""Every example runs, against a real server."""

import importlib.util
import runpy
import sys
from types import ModuleType

import pytest

from docs.markdown import ROOT

EXAMPLES = {
    "chat.py": "source: ",
    "conversation.py": "not shown again: express",
    "langchain.py": "tides ports",
    "open_webui.py": "'format': 'open-webui', 'documents': 4",
    "speculate.py": "computed during the search",
}


def test_every_example_is_run():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, demo_server, monkeypatch, capsys):
    if name == "langchain.py" and importlib.util.find_spec("langchain_core") is None:
        stand_in(monkeypatch)
    monkeypatch.setattr(sys, "argv", [name, demo_server.url])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out


def stand_in(monkeypatch):
    """The two classes of langchain-core that the adapter uses, where it is not installed."""
    from pydantic import BaseModel

    class Document(BaseModel):
        page_content: str
        id: str | None = None

    class BaseDocumentCompressor(BaseModel):
        pass

    for module in ("langchain_core", "langchain_core.documents"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(sys.modules["langchain_core.documents"], "Document", Document, raising=False)
    monkeypatch.setattr(
        sys.modules["langchain_core.documents"], "BaseDocumentCompressor", BaseDocumentCompressor, raising=False
    )
    monkeypatch.delitem(sys.modules, "slotcache.ordering.langchain", raising=False)
