"""Probabilities of tokens in answers: OpenAI's shapes through its client, llama-server's, and a decode to compare with."""

import numpy as np
import pytest
from slotcache.models.model import Model
from support.dialects import OF
from support.lab import Lab

CHAT = {"model": "any", "messages": [{"role": "user", "content": "Tell me of the river."}], "temperature": 0}
TEXT = {"model": "any", "prompt": "The river rises in", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def reference(tiny):
    """The logarithms of probabilities after some tokens, from a decode of their own."""
    model = Model(tiny)

    def logprobs(tokens):
        lab = Lab(model, num_cells=256)
        (row,) = lab.run(np.array(tokens, np.int32), limit=1).logits
        lab.close()
        exact = row.astype(np.float64)
        return exact - np.logaddexp.reduce(exact)

    yield logprobs
    model.close()


def streamed(server, path, body):
    return OF[path].events_of(server.http.post(path, json=body | {"stream": True}))


def test_they_are_those_of_a_decode_of_their_own(server, reference):
    prompt = server.http.post("/tokenize", json={"content": TEXT["prompt"]}).json()["tokens"]
    asked = {"prompt": prompt, "n_predict": 8, "n_probs": 5, "temperature": 2.0, "seed": 3, "repeat_penalty": 1.5}
    answer = server.http.post("/completion", json=asked | {"logit_bias": [["river", 4.0]]}).json()
    reported = answer["completion_probabilities"]
    assert len(reported) == 8 and "".join(token["token"] for token in reported) == answer["content"]
    for at, token in enumerate(reported):
        exact = reference([*prompt, *(before["id"] for before in reported[:at])])
        assert token["logprob"] == pytest.approx(exact[token["id"]], abs=1e-3)
        best = [each["id"] for each in token["top_logprobs"]]
        assert best == np.argsort(-exact)[:5].tolist()
        assert [each["logprob"] for each in token["top_logprobs"]] == pytest.approx(exact[best], abs=1e-3)


def test_a_chat_through_openai_s_client(server):
    asked = CHAT | {"max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    choice = server.openai.chat.completions.create(**asked).choices[0]
    reported = choice.logprobs.content
    assert len(reported) == 6 and "".join(token.token for token in reported) == choice.message.content
    for token in reported:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token
    chunks = list(server.openai.chat.completions.create(**asked, stream=True))
    pieces = [(chunk.choices[0].delta.content or "", chunk.choices[0].logprobs) for chunk in chunks]
    sent = [(text, logprobs.content) for text, logprobs in pieces if logprobs]
    assert all("".join(token.token for token in tokens) == text for text, tokens in sent)
    assert [token for _, tokens in sent for token in tokens] == reported
    alone = server.openai.chat.completions.create(**CHAT, max_tokens=2, logprobs=True).choices[0].logprobs.content
    assert [token.logprob for token in alone] == [token.logprob for token in reported[:2]]
    assert all(token.top_logprobs == [] for token in alone)
    assert server.openai.chat.completions.create(**CHAT, max_tokens=2).choices[0].logprobs is None


def test_a_text_through_openai_s_client(server):
    choice = server.openai.completions.create(**TEXT, logprobs=2).choices[0]
    reported = choice.logprobs
    assert len(reported.tokens) == 8 and "".join(reported.tokens) == choice.text
    assert reported.text_offset == [len("".join(reported.tokens[:at])) for at in range(8)]
    for token, logprob, best in zip(reported.tokens, reported.token_logprobs, reported.top_logprobs, strict=True):
        assert len(best) == 2 and best[token] == logprob == max(best.values())
    chunks = [chunk.choices[0] for chunk in server.openai.completions.create(**TEXT, logprobs=2, stream=True)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [token for part in parts for token in part.tokens] == reported.tokens
    assert [offset for part in parts for offset in part.text_offset] == reported.text_offset
    assert [token["id"] for token in reported.content] == [token["id"] for part in parts for token in part.content]
    assert server.openai.completions.create(**TEXT, logprobs=0).choices[0].logprobs.token_logprobs == reported.token_logprobs


def test_several_choices_each_have_theirs(server):
    asked = CHAT | {"temperature": 2.0, "seed": 1, "n": 3, "max_tokens": 4, "logprobs": True}
    choices = server.openai.chat.completions.create(**asked).choices
    assert all("".join(token.token for token in each.logprobs.content) == each.message.content for each in choices)
    assert len({each.message.content for each in choices}) > 1


def test_after_sampling_they_are_what_the_samplers_left(server):
    asked = {"prompt": TEXT["prompt"], "n_predict": 5, "n_probs": 40, "post_sampling_probs": True, "seed": 5}
    for token in server.http.post("/completion", json=asked | {"top_k": 4, "top_p": 1, "min_p": 0}).json()[
        "completion_probabilities"
    ]:
        best = [each["prob"] for each in token["top_probs"]]
        assert len(best) == 4 and best == sorted(best, reverse=True) and sum(best) == pytest.approx(1)
        assert token["prob"] in best and "logprob" not in token
    greedy = server.http.post("/completion", json=asked | {"temperature": 0}).json()["completion_probabilities"]
    assert all(token["prob"] == 1 and len(token["top_probs"]) == 1 for token in greedy)


def test_a_stream_has_an_event_for_each_token(server):
    asked = {"prompt": TEXT["prompt"], "n_predict": 6, "n_probs": 1, "temperature": 0}
    events = streamed(server, "/completion", asked)
    assert [len(event["completion_probabilities"]) for event in events if not event["stop"]] == [1] * 6
    whole = server.http.post("/completion", json=asked).json()
    assert "completion_probabilities" not in events[-1]
    assert [event["completion_probabilities"][0] for event in events[:-1]] == whole["completion_probabilities"]
    kept = asked | {"stop": "".join(tokens_of(whole)[1:3]) + "never"}  # so that three tokens become known at once
    for known in (events, streamed(server, "/completion", kept)):
        assert [each["tokens"] for each in known[:-1]] == [[token["id"]] for token in whole["completion_probabilities"]]
        assert [each["tokens_predicted"] for each in known[:-1]] == [1, 2, 3, 4, 5, 6]
        assert "".join(each["content"] for each in known) == whole["content"]


def tokens_of(answer):
    return [token["token"] for token in answer["completion_probabilities"]]


def test_the_tokens_of_a_stop_string_are_not_reported(server):
    asked = {"prompt": TEXT["prompt"], "n_predict": 8, "n_probs": 0, "logprobs": 0, "temperature": 0}
    texts = tokens_of(server.http.post("/completion", json=asked).json())
    assert all(texts) and len(texts) == 8
    whole = asked | {"stop": texts[4] + texts[5]}  # two tokens, of which the first is held back
    assert tokens_of(server.http.post("/completion", json=whole).json()) == texts[:4]
    events = streamed(server, "/completion", whole)
    assert [token for event in events if not event["stop"] for token in tokens_of(event)] == texts[:4]


def test_of_a_token_in_which_a_stop_string_begins_the_part_in_front_is_reported(server):
    asked = {"prompt": TEXT["prompt"], "n_predict": 10, "logprobs": 0, "temperature": 0}
    free = server.http.post("/completion", json=asked).json()
    texts, ids = tokens_of(free), [token["id"] for token in free["completion_probabilities"]]
    whole = "".join(texts)
    long = [at for at, text in enumerate(texts[:-1]) if len(text) > 1]
    assert len(long) > 3
    for at in long:
        start = len("".join(texts[:at])) + 1
        stop = whole[start : start + len(texts[at]) + 1]  # the rest of the token, and two characters of those behind it
        cut = whole[: whole.index(stop)]
        for body in (asked | {"stop": stop}, asked | {"stop": [stop, whole[3:5] + "never"]}):
            answer = server.http.post("/completion", json=body).json()
            reported = answer["completion_probabilities"]
            assert answer["content"] == cut == "".join(tokens_of(answer))
            assert bytes(byte for token in reported for byte in token["bytes"]).decode() == cut
            assert [token["id"] for token in reported] == ids[: len(reported)]
            events = streamed(server, "/completion", body)
            assert [
                token for event in events if not event["stop"] for token in event["completion_probabilities"]
            ] == reported
    chat = CHAT | {"max_tokens": 8, "logprobs": True}
    said = server.openai.chat.completions.create(**chat).choices[0].message.content
    for start in range(1, len(said) - 3):
        chunks = list(server.openai.chat.completions.create(**chat, stop=said[start : start + 3], stream=True))
        sent = [(one.choices[0].delta.content or "", one.choices[0].logprobs) for one in chunks]
        assert all("".join(token.token for token in reported.content) == text for text, reported in sent if reported)
        assert "".join(text for text, _ in sent) == said[: said.index(said[start : start + 3])]


def test_a_character_of_several_tokens_belongs_to_the_last_of_them(server):
    spelt = server.http.post("/tokenize", json={"content": "\u6f22"}).json()["tokens"]
    assert len(spelt) > 1
    asked = {"prompt": "x", "n_predict": 1, "logprobs": 0, "temperature": 0, "stream": False}
    reported = []
    for token in spelt:  # forced one by one
        body = asked | {"prompt": [1, *(each["id"] for each in reported)], "logit_bias": [[token, 1e9]]}
        reported += server.http.post("/completion", json=body).json()["completion_probabilities"]
    assert [token["id"] for token in reported] == spelt
    assert bytes(byte for token in reported for byte in token["bytes"]).decode() == "\u6f22"
    (last,) = server.http.post("/completion", json=asked | {"logit_bias": [[spelt[0], 1e9]]}).json()[
        "completion_probabilities"
    ]
    assert last["token"] == "\ufffd", "the answer ends within the character"


def test_the_end_of_an_answer_is_reported_as_llama_server_does(server):
    end = min(server.service.model.ends)
    asked = {"prompt": "x", "n_predict": 5, "n_probs": 1, "logit_bias": [[end, 1e9]], "temperature": 0}
    answer = server.http.post("/completion", json=asked).json()
    (token,) = answer["completion_probabilities"]
    assert answer["content"] == token["token"] == "" and (token["id"], token["bytes"]) == (end, [])
    chat = server.http.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "logit_bias": {str(end): 1e9}}).json()
    assert [token["id"] for token in chat["choices"][0]["logprobs"]["content"]] == [end]
    chunks = streamed(server, "/v1/chat/completions", CHAT | {"logprobs": True, "logit_bias": {str(end): 1e9}})
    assert [token["id"] for token in chunks[-1]["choices"][0]["logprobs"]["content"]] == [end]


def test_a_whole_answer_lists_no_more_than_memory_holds(server):
    """A body of a few bytes must not order gigabytes; a stream keeps nothing of what it has sent."""
    many = TEXT | {"n": 128, "max_tokens": 1000, "n_probs": 100, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json=many)
    message = answer.json()["error"]["message"]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
    assert "at most 4,000,000" in message and "stream it" in message
    assert server.http.post("/v1/completions", json=TEXT | {"n": 2, "n_probs": 100}).status_code == 200
    with server.http.stream("POST", "/v1/completions", json=many | {"stream": True}) as answer:
        assert answer.status_code == 200
