"""Responses and messages about the server's own documents, over a real port: the same as the chat of the same question."""

from typing import Any

import openai
import pytest
from slotcache.models.demo import FILE
from slotcache.models.demo.corpus import SUGGESTED, Corpus
from support.dialects import CHATS, report_in
from support.notes import is_ready

from server.conftest import running, text_of, until

MAYOR, MARKET = "Who is the mayor of Tarnwick?", "What is the speciality of Tarnwick?"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Starts a server with the bundled documents. folder: of its index and its cache, which a later start finds again."""
    documents = Corpus.load().write(tmp_path_factory.mktemp("corpus"))
    return lambda folder: running(
        FILE, docs=str(documents), docs_db=str(folder / "db"), cache_dir=str(folder / "cache"), flash_attn="auto"
    )


@pytest.fixture(scope="module")
def folder_index(served, tmp_path_factory):
    with served(tmp_path_factory.mktemp("library")) as up:
        until(lambda: is_ready(up))
        yield up


def ask(server, question, **fields):
    """The chat that the others are compared with."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "temperature": 0, "retrieval": True}
    answer = server.http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def respond(server, question, **fields: Any):
    extra = {"retrieval": True} | fields.pop("extra", {})
    usual: Any = {"model": "any", "temperature": 0, "max_output_tokens": 60}
    return server.openai.responses.create(input=question, extra_body=extra, **usual | fields)


def post_message(server, question, **fields):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, "temperature": 0, "retrieval": True}
    return server.http.post("/v1/messages", json=body | fields)


def found(report):
    return report["retrieved"], report["citations"]


@pytest.mark.parametrize("question", SUGGESTED[:2])
@pytest.mark.parametrize("api", CHATS, ids=str)
def test_an_answer_and_its_stream_are_those_of_the_same_chat(folder_index, api, question):
    chat = ask(folder_index, question, cache_prompt=False)
    asked: Any = {"most": 60, "model": FILE.stem, "retrieval": True, "ignore_eos": False}
    answer = api.ask(folder_index, question, stream=False, **asked).json()
    assert api.read(answer).text == text_of(chat)
    assert found(answer["slotcache"]) == found(chat["slotcache"]) and answer["slotcache"]["citations"]
    events = api.events_of(api.ask(folder_index, question, stream=True, **asked))
    *_, report = (report for event in events if (report := report_in(event)))
    said = api.join(events)
    assert found(report) == found(chat["slotcache"]) and (said.text, said.reason) == (text_of(chat), "stop")
    assert said.num_cached > 200, "retrieval opts in to the cache"


def test_a_stored_response_has_its_report(folder_index):
    answer = respond(folder_index, MAYOR)
    assert found(folder_index.openai.responses.retrieve(answer.id).slotcache) == found(answer.slotcache)


def test_the_documents_of_a_response_stay_in_its_history(folder_index, served):
    first = respond(folder_index, MAYOR)
    second = respond(folder_index, MARKET, previous_response_id=first.id)
    earlier = {one["id"] for one in first.slotcache["retrieved"]}
    repeated = set(second.slotcache["repeated"])
    assert repeated == earlier & {one["id"] for one in second.slotcache["retrieved"]} != set()
    ids = [one["id"] for one in second.slotcache["documents"]]
    assert len(ids) == len(set(ids)) and earlier <= set(ids), "each document stands in the prompt once"
    same = ask(folder_index, MAYOR, conversation="same") and ask(
        folder_index, MARKET, conversation="same", cache_prompt=False
    )
    assert same["usage"]["prompt_tokens"] == second.usage.input_tokens
    assert same["choices"][0]["message"]["content"] == second.output_text
    unstored = respond(folder_index, MAYOR, store=False)
    with pytest.raises(openai.NotFoundError):
        respond(folder_index, MARKET, previous_response_id=unstored.id)


def test_a_restart_keeps_the_documents_of_a_response(served, tmp_path):
    with served(tmp_path) as up:
        until(lambda: is_ready(up))
        first = respond(up, MAYOR)
        repeated = respond(up, MARKET, previous_response_id=first.id).slotcache["repeated"]
    with served(tmp_path) as up:
        until(lambda: is_ready(up))
        shown = up.openai.responses.retrieve(first.id)
        assert found(shown.slotcache) == found(first.slotcache)
        second = respond(up, MARKET, previous_response_id=first.id)
        assert second.slotcache["repeated"] == repeated != []


def test_prompts_are_counted_with_their_documents(folder_index):
    for path, body in (
        ("/v1/responses/input_tokens", {"input": MAYOR}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": MAYOR}]}),
    ):
        plain, whole = (
            folder_index.http.post(path, json=body | fields).json()["input_tokens"]
            for fields in ({}, {"retrieval": {"top_k": 1}})
        )
        assert whole == ask(folder_index, MAYOR, retrieval={"top_k": 1})["usage"]["prompt_tokens"] > plain


@pytest.mark.parametrize("api", CHATS, ids=str)
def test_documents_of_the_client_come_first(folder_index, api):
    asked: Any = {"documents": [{"id": "own", "text": "The otter of the north sleeps in a hat."}], "most": 4}
    answer = api.ask(folder_index, MAYOR, model=FILE.stem, stream=False, retrieval=True, document_order="retrieval", **asked)
    report = answer.json()["slotcache"]
    assert [one["id"] for one in report["documents"]] == ["own", *(one["id"] for one in report["retrieved"])]


def test_wrong_wishes_are_refused_in_the_shape_of_each(folder_index, server):
    for wrong in ({"top_k": 0}, {"paths": ["x"] * 101}, "yes", 3):
        with pytest.raises(openai.BadRequestError) as refused:
            respond(folder_index, MAYOR, extra={"retrieval": wrong})
        assert "retrieval" in str(refused.value.param)
        answer = post_message(folder_index, MAYOR, retrieval=wrong)
        assert answer.status_code == 400 and "retrieval" in answer.json()["error"]["message"]
    with pytest.raises(openai.PermissionDeniedError) as denied:
        respond(folder_index, MAYOR, extra={"cache_scope": "other"})
    assert "Tarnwick" not in str(denied.value)
    denied = post_message(folder_index, MAYOR, cache_scope="other")
    assert denied.status_code == 403 and denied.json()["error"]["type"] == "permission_error"
    assert "retrieval.topk" in post_message(folder_index, MAYOR, retrieval={"topk": 3}).json()["warnings"][0]
    with pytest.raises(openai.BadRequestError) as refused:
        respond(server, MAYOR)
    assert refused.value.param == "retrieval" and "--docs" in str(refused.value)
    assert post_message(server, MAYOR).status_code == 400


def test_results_of_tools_go_on_without_a_question(folder_index):
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "Nothing to see."}
    extra = {"cache_scope": "", "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]}
    asked = respond(folder_index, MAYOR, extra=extra)
    later = respond(folder_index, [call, result], previous_response_id=asked.id, extra=extra).model_dump()["slotcache"]
    assert later["retrieved"] == [] and later["documents"], "those of the question, which stand in the prompt"
    queried = respond(
        folder_index, [call, result], previous_response_id=asked.id, extra=extra | {"retrieval": {"query": MARKET}}
    )
    report = queried.model_dump()["slotcache"]
    found = {one["id"] for one in report["retrieved"]}
    assert found and found <= {one["id"] for one in report["documents"]} | set(report["repeated"])
    body = {"messages": [{"role": "system", "content": "No question."}], "retrieval": True}
    refused = folder_index.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "retrieval")
