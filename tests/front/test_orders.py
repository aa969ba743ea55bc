"""Orders of long histories: the work grows with the request, and no faster."""

import json
from itertools import count
from sys import setprofile

import pytest
from slotcache.front import orders
from slotcache.front.chat_documents import read_chat
from slotcache.front.lengths import Lengths
from slotcache.front.settings import FrontSettings


def test_work_grows_with_the_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_TURNS", 1)  # no turn's order is kept: each is chosen anew behind all that is cached

    def calls(turns: int) -> int:
        documents = [[{"id": f"d{at}", "text": f"Text {at}."}] for at in range(turns)]
        messages = [{"role": "user", "content": "Why?", "documents": one} for one in documents]
        chat = read_chat(json.dumps({"messages": messages}).encode(), "auto")
        known, counted = orders.Orders(FrontSettings(upstream="http://127.0.0.1:1"), Lengths(10)), count()
        known.plan(chat)
        setprofile(lambda *_: next(counted))
        try:
            plan = known.plan(chat)
        finally:
            setprofile(None)
        assert plan.num_expected == plan.num_documents == turns
        return next(counted)

    assert calls(800) < 9 * calls(100)


def test_the_orders_of_large_turns_take_no_more_memory_than_those_of_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_RANKS", 1000)
    known = orders.Orders(FrontSettings(upstream="http://127.0.0.1:1"), Lengths(10))
    for number in (*range(30), 29):
        body = {"messages": [{"role": "user", "content": f"{number}?"}], "documents": [f"{at}" for at in range(100)]}
        known.plan(read_chat(json.dumps(body).encode(), "auto"))
    kept = list(map(len, known._kept.values()))
    assert kept == [100] * 10
