"""Documents that a conversation already holds are referred to, not shown again."""

import pytest

TEXTS = {
    name: f"Facts about number {name}: it is blue and old. " * 2
    for name in ("1", "2", "4", "5", "10", "20", "30", "40", "50")
}


def turn(names, question="What is it?", **texts):
    documents = [{"id": name, "text": texts.get(name, TEXTS[name])} for name in names]
    return {"role": "user", "content": question, "documents": documents}


def chat(*turns):
    """Turns of one conversation, with an answer between each two."""
    messages = [turns[0]]
    for later in turns[1:]:
        messages += [{"role": "assistant", "content": "It is blue."}, later]
    return {"messages": messages, "cache_scope": "dedup"}


def rendered(server, body, **fields):
    return server.http.post("/apply-template", json=body | fields).json()["prompt"]


def last_turn(prompt):
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def test_what_an_earlier_turn_holds_is_referred_to_in_rank(server):
    prompt = rendered(server, chat(turn(["1", "2", "4"]), turn(["1", "5", "2"], "And then?")))
    assert prompt.count("[1]\n") == prompt.count("[2]\n") == 1
    shown = last_turn(prompt)
    assert shown.startswith("[5]\nFacts about number 5")
    assert shown.endswith("See [1] above.\nSee [2] above.\n\nAnd then?")
    assert "number 1" not in shown and "number 2" not in shown


def test_each_turn_sends_what_is_new(server):
    prompt = rendered(server, chat(turn(["10", "20", "30"]), turn(["10", "20", "40"]), turn(["10", "30", "50"])))
    for name in ("10", "20", "30", "40", "50"):
        assert prompt.count(f"[{name}]\n") == 1
    assert last_turn(prompt).startswith("[50]\n") and "See [10] above.\nSee [30] above." in last_turn(prompt)


def test_nothing_new_means_no_documents_and_nothing_old_no_hints(server):
    assert (
        last_turn(rendered(server, chat(turn(["1", "2"]), turn(["2", "1"]))))
        == "See [2] above.\nSee [1] above.\n\nWhat is it?"
    )
    assert "See [" not in rendered(server, chat(turn(["1"]), turn(["2"])))


@pytest.mark.parametrize(
    "body",
    [
        chat(turn(["1"]), turn(["1"], **{"1": "Other facts about number 1."})),  # the text has changed
        {"messages": [turn(["1"])], "cache_scope": "dedup"},  # the turn that held it is gone
    ],
)
def test_what_the_conversation_does_not_hold_is_sent_again(server, body):
    assert last_turn(rendered(server, body)).startswith("[1]\n")


def test_hints_break_no_shared_prefix(server):
    """Behind the documents: with and without a hint, what stands before it is the same."""
    with_hint = last_turn(rendered(server, chat(turn(["1"]), turn(["1", "5"]))))
    without = last_turn(rendered(server, chat(turn(["2"]), turn(["5"]))))
    assert with_hint.startswith(without.removesuffix("What is it?"))


def test_the_ranking_names_what_is_referred_to(server):
    """Rank 2 > 4 > 5 where 2 stands above and 5 is cached behind the first turn: 4 is not the most relevant."""
    first = chat(turn(["2"], "Ranked?")) | {"cache_scope": "ranked"}
    said = server.chat(**first, max_tokens=3)["choices"][0]["message"]["content"]

    def second(*names):
        messages = [turn(["2"], "Ranked?"), {"role": "assistant", "content": said}, turn(names, "And then?")]
        return {"messages": messages, "cache_scope": "ranked"}

    server.chat(**second("5"), max_tokens=1)
    asked = second("2", "4", "5")
    shown = last_turn(rendered(server, asked))
    assert shown.startswith(f"[5]\n{TEXTS['5'].strip()}\n\n[4]\n")
    assert shown.endswith("See [2] above.\n\nMost relevant: 2 > 4\n\nAnd then?")
    hidden = last_turn(rendered(server, asked, order_hint=False))
    assert hidden.endswith("See [2] above.\n\nAnd then?")
    unmoved = last_turn(rendered(server, second("5", "2", "4")))
    assert unmoved.startswith("[5]\n") and unmoved.endswith("See [2] above.\n\nAnd then?"), "nothing has moved"


def test_it_can_be_turned_off(server):
    body = chat(turn(["1", "2"]), turn(["1"]))
    assert last_turn(rendered(server, body, dedup="off")).startswith("[1]\n")
    wrong = server.http.post("/v1/chat/completions", json=body | {"dedup": "sometimes"})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "dedup"


def test_the_answer_says_what_was_not_repeated(server):
    first = chat(turn(["1", "2"]))
    said = server.chat(**first)["choices"][0]["message"]["content"]
    body = chat(turn(["1", "2"]), turn(["2", "5"]))
    body["messages"][1]["content"] = said
    answer = server.chat(**body)
    assert answer["slotcache"]["repeated"] == ["2"]
    assert [document["id"] for document in answer["slotcache"]["documents"]] == ["1", "2", "5"]
    assert answer["slotcache"]["documents"][0]["cached_tokens"] == answer["slotcache"]["documents"][0]["tokens"]
    assert server.chat(**first)["slotcache"]["repeated"] == []
