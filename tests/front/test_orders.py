"""Orders of long histories: the work grows with the request, and no faster."""

import json
from itertools import count
from sys import setprofile

import pytest
from slotcache.front import orders
from slotcache.front.chat import read_chat
from slotcache.front.lengths import Lengths
from slotcache.front.settings import Front


def test_work_grows_with_the_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_TURNS", 1)  # no turn's order is kept: each is chosen anew behind all that is cached

    def calls(turns: int) -> int:
        documents = [[{"id": f"d{at}", "text": f"Text {at}."}] for at in range(turns)]
        messages = [{"role": "user", "content": "Why?", "documents": one} for one in documents]
        chat = read_chat(json.dumps({"messages": messages}).encode(), "auto")
        known, counted = orders.Orders(Front(upstream="http://127.0.0.1:1"), Lengths(10)), count()
        known.plan(chat)
        setprofile(lambda *_: next(counted))
        try:
            plan = known.plan(chat)
        finally:
            setprofile(None)
        assert plan.num_expected == plan.num_documents == turns
        return next(counted)

    assert calls(800) < 9 * calls(100)
