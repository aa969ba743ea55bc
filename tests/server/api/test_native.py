"""llama-server's `/completion`, field by field."""

from typing import Any

import pytest
from support.dialects import OF

from server.conftest import running

PROMPT = "I believe the meaning of life is"
ASKED: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True}


def complete(server, **body):
    answer = server.http.post("/completion", json=ASKED | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server, path, **body: Any):
    return OF[path].events_of(server.http.post(path, json=body | {"stream": True}))


def test_an_answer_says_all_that_llama_server_says(server):
    length = len(server.http.post("/tokenize", json={"content": PROMPT, "add_special": True}).json()["tokens"])
    said = complete(server, return_tokens=True)
    assert said["stop"] is True and said["index"] == 0 and said["id_slot"] in range(4)
    assert len(said["tokens"]) == said["tokens_predicted"] == said["timings"]["predicted_n"] == 8
    assert said["tokens_evaluated"] == length and said["tokens_cached"] == length + 7
    assert said["prompt"] == PROMPT
    assert (said["stop_type"], said["stopping_word"], said["truncated"]) == ("limit", "", False)
    assert said["has_new_line"] == ("\n" in said["content"])
    spelt = server.http.post("/detokenize", json={"tokens": said["tokens"]}).json()["content"]
    assert spelt == said["content"]
    assert complete(server)["tokens"] == []


def test_the_token_that_ends_an_answer_is_named(server):
    end = server.http.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"]
    ended = complete(server, ignore_eos=False, logit_bias=[[end[0], 1000]])
    assert (ended["stop_type"], ended["tokens_predicted"], ended["content"]) == ("eos", 1, "")


def test_a_full_context_truncates(tiny):
    with running(tiny, ctx_size=256) as small:
        prompt = [100] * (small.service.submitter.limit - 5)
        full = complete(small, prompt=prompt, n_predict=-1)
        assert full["truncated"] is True and full["tokens_predicted"] == 5 and full["stop_type"] == "limit"
        assert complete(small, prompt=prompt, n_predict=5)["truncated"] is False
        assert complete(small, prompt=prompt, n_predict=6)["truncated"] is True


def test_the_settings_in_force_are_shown(server):
    options = {"seed": 7, "top_k": 5, "stop": ["x"], "timings_per_token": True, "temperature": 0.5}
    shown = complete(server, **options)["generation_settings"]
    assert {name: shown[name] for name in options} == options | {"stop": ["x"]}
    assert shown["n_predict"] == shown["max_tokens"] == 8 and shown["stream"] is False
    assert shown["ignore_eos"] is True and shown["logit_bias"] and all(bias["bias"] is None for bias in shown["logit_bias"])
    assert complete(server, ignore_eos=False)["generation_settings"]["logit_bias"] == []


def test_a_stream_adds_up_to_the_whole_answer(server):
    whole = complete(server, return_tokens=True)
    *pieces, last = stream(server, "/completion", **ASKED)
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert [piece["tokens_predicted"] for piece in pieces] == list(range(1, 9))
    assert all(piece["stop"] is False and piece["tokens_evaluated"] == whole["tokens_evaluated"] for piece in pieces)
    shared = ("prompt", "stop_type", "truncated", "has_new_line", "tokens_predicted", "tokens_cached")
    assert {name: last[name] for name in shared} == {name: whole[name] for name in shared}


def test_a_stream_has_the_tokens_of_no_text(server):
    """Those of a stop string, the token that ends an answer, and the beginning of a character."""
    whole = complete(server, n_predict=24)["content"]
    end = server.http.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"]
    part = server.http.post("/tokenize", json={"content": "\N{SNOWMAN}"}).json()["tokens"][0]
    for fields in (
        {"n_predict": 24, "stop": [whole[8:11]]},
        {"ignore_eos": False, "logit_bias": [[end[0], 1000]]},
        {"n_predict": 3, "logit_bias": [[part, 1000]]},
    ):
        expected = complete(server, return_tokens=True, **fields)["tokens"]
        pieces = stream(server, "/completion", **ASKED | fields)
        assert expected and [token for piece in pieces for token in piece["tokens"]] == expected


@pytest.mark.parametrize("streams", [False, True])
def test_only_the_wanted_fields_are_sent(server, streams):
    wanted = ["content", "generation_settings/n_predict", "prompt", "none/such"]
    asked = ASKED | {"response_fields": wanted}
    last = stream(server, "/completion", **asked)[-1] if streams else complete(server, **asked)
    assert set(last) == set(wanted[:3])
    assert last["generation_settings/n_predict"] == 8 and last["prompt"] == PROMPT


def test_fields_and_biases_are_bounded_over_all_choices(server):
    """Each choice has them all, and the event loop has no time for millions."""
    biases = [[token, 1] for token in range(400)]
    for name, fields in (("response_fields", ["content"] * 257), ("logit_bias", biases)):
        refused = server.http.post("/completion", json=ASKED | {"n": 100, name: fields})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name
    assert len(complete(server, n=2, logit_bias=biases)) == 2


def test_several_prompts_have_their_own_bodies(server):
    other = "The sea"
    bodies = complete(server, prompt=[PROMPT, other], n=2)
    assert [body["index"] for body in bodies] == [0, 1, 2, 3]
    assert [body["prompt"] for body in bodies] == [PROMPT, PROMPT, other, other]
    pieces = stream(server, "/completion", **ASKED | {"prompt": [PROMPT, other]})
    for index, body in ((0, bodies[0]), (1, bodies[2])):
        assert "".join(piece["content"] for piece in pieces if piece["index"] == index) == body["content"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_times_come_with_each_piece_where_they_are_wanted(server, path):
    said = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    asked = {"max_tokens": 4, "ignore_eos": True, "return_progress": True, **said}
    events = stream(server, path, **asked, timings_per_token=True)
    counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    progress = [event["timings"] for event in events if "prompt_progress" in event]
    assert counts == sorted(counts) and {1, 2, 3, 4} <= set(counts)
    assert progress[0]["prompt_n"] == progress[0]["prompt_ms"] == 0 and progress[-1]["prompt_n"] > 0
    assert sum("timings" in event for event in stream(server, path, **asked)) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_verbose_answer_shows_its_prompt(server, path):
    said = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    asked = {"max_tokens": 2, **said}
    shown = server.http.post(path, json=asked | {"verbose": True}).json()["__verbose"]
    assert PROMPT in shown["prompt"] and shown["generation_settings"]["n_predict"] == 2
    assert "__verbose" not in server.http.post(path, json=asked).json()
    assert PROMPT in stream(server, path, **asked, verbose=True)[-1]["__verbose"]["prompt"]


def test_a_request_may_echo_its_prompt(server):
    asked = {"model": "any", "prompt": [PROMPT, "The sea"], "max_tokens": 4, "temperature": 0}
    plain = server.openai.completions.create(**asked)
    echoed = server.openai.completions.create(**asked, echo=True)
    assert [choice.text for choice in echoed.choices] == [
        prompt + choice.text for prompt, choice in zip(asked["prompt"], plain.choices, strict=True)
    ]
    texts = ["", ""]
    for chunk in server.openai.completions.create(**asked, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in echoed.choices]
    assert server.http.post("/v1/completions", json={"prompt": "a", "echo": True, "suffix": "b"}).status_code == 400


def test_a_suffix_needs_a_model_that_fills_gaps(server):
    answer = server.http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert answer.status_code == 501 and answer.json()["error"]["type"] == "not_supported_error"


def test_a_text_stream_ends_with_its_usage(server):
    last = stream(server, "/v1/completions", prompt=PROMPT, max_tokens=3, ignore_eos=True)[-1]
    assert last["usage"]["completion_tokens"] == 3 and last["choices"][0]["finish_reason"] == "length"
