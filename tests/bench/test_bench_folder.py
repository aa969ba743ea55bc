"""Questions about a folder: what is sent while one is typed, and the folder itself."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest
from slotcache.bench.cli import main
from slotcache.bench.client import Client
from slotcache.bench.scenarios import typing_ahead
from slotcache.bench.server_api import ChatApi, Sampling
from slotcache.retrieval import Index, Query

ARGS = argparse.Namespace(subjects=12, k=3, words=120, seconds=0.0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typing_ahead, "REST", 0.05)
    monkeypatch.setattr(typing_ahead, "PAUSE", 0.0)


@pytest.mark.parametrize("along", [False, True])
def test_a_typed_question_is_sent_as_the_page_does(serve: Any, chat_events: Any, hurried: None, along: bool) -> None:
    async def handler(path: str, body: Any, send: Any) -> Any:
        if path == "/v1/search":
            return {}
        for event in chat_events(["a"] * body["max_tokens"], prompt=40, cached=30):
            await send(event)

    server = serve(handler)
    text = "What did the old house of Tarnwick do when it rained?"

    async def typed() -> Any:
        async with Client(server.url, ChatApi(), Sampling(max_tokens=3)) as client:
            return await typing_ahead._typed(client, ARGS, text, along)

    assert asyncio.run(typed()).computed_tokens == 10
    *searches, (path, body) = server.requests
    assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": text}] and body["retrieval"]
    begun = ["What did the", "What did the old house of", "What did the old house of Tarnwick do when"]
    assert [one["query"] for _, one in searches] == (begun if along else [])
    assert all(one["speculate"] == body["conversation"]["id"] for _, one in searches)


def test_a_question_finds_the_documents_of_its_subject(tmp_path: Path) -> None:
    typing_ahead._write(tmp_path / "docs", ARGS)
    index = Index([tmp_path / "docs"], tmp_path / "index.db")
    index.refresh()
    for subject in typing_ahead.PLACES[: ARGS.subjects]:
        hits = asyncio.run(index.search().hits(Query(text=typing_ahead._question(subject, 1), top_k=ARGS.k)))
        assert {hit.chunk.title for hit in hits} == {f"{subject}, part {number}" for number in range(ARGS.k)}
    index.close()


WRONG = [(["--url", "http://127.0.0.1:1"], "leave --url out"), (["--turns", "50"], "expected 4 for each turn")]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_it_needs_servers_and_subjects_of_its_own(capsys: Any, options: list[str], says: str) -> None:
    assert main(["speculation", "--typing", *options]) == 2
    assert says in capsys.readouterr().err
