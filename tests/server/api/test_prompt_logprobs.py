"""Text completions that begin with their prompt and the log-probabilities of its tokens: `echo` with `logprobs`."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from slotcache.models.model import Model
from support.lab import Lab

from server.conftest import running

PROMPT = "The river rises in the hills, and it falls into the sea behind the old town. " * 6
ASKED = {"model": "any", "prompt": PROMPT, "temperature": 0, "echo": True, "max_tokens": 3}


@pytest.fixture(scope="module")
def reference(tiny):
    """The log-probabilities of a text's tokens but the first: of each position, those of the whole vocabulary."""
    model = Model(tiny)

    def logprobs(tokens):
        lab = Lab(model, num_cells=1024)
        rows = [lab.run(np.array(tokens[:stop], np.int32), limit=1, cache=False).logits[0] for stop in range(1, len(tokens))]
        lab.close()
        exact = np.array(rows, np.float64)
        return exact - np.logaddexp.reduce(exact, axis=1, keepdims=True)

    yield logprobs
    model.close()


def tokens_of(server, text):
    return server.http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]


def logprobs_of_prompt(server, body, answer):
    """The prompt's tokens as they were told, and their log-probabilities but for the first."""
    reported, size = answer["choices"][0]["logprobs"], len(tokens_of(server, body["prompt"]))
    assert len(reported["tokens"]) == size + answer["usage"]["completion_tokens"]
    return [entry["id"] for entry in reported["content"][:size]], reported["token_logprobs"][1:size]


def test_they_are_those_of_the_model(server, reference):
    tokens = tokens_of(server, PROMPT)
    assert len(tokens) > server.service.context.max_rows, "more than one step"
    answer = server.openai.completions.create(**ASKED, logprobs=4)
    reported, exact = answer.choices[0].logprobs, reference(tokens)
    assert [entry["id"] for entry in reported.content][: len(tokens)] == tokens and len(reported.tokens) == len(tokens) + 3
    assert reported.token_logprobs[0] is None and reported.top_logprobs[0] is None
    own = exact[np.arange(len(tokens) - 1), tokens[1:]]
    assert reported.token_logprobs[1 : len(tokens)] == pytest.approx(own.tolist(), abs=1e-3)
    for row, entry in zip(exact, reported.content[1:], strict=False):
        best = [each["id"] for each in entry["top_logprobs"]]
        assert best == np.argsort(-row)[:4].tolist()
        assert [each["logprob"] for each in entry["top_logprobs"]] == pytest.approx(row[best].tolist(), abs=1e-3)


def test_their_texts_are_the_answer_s(server):
    plain, reported = (server.openai.completions.create(**ASKED, **more).choices[0] for more in ({}, {"logprobs": 1}))
    assert reported.text == plain.text == "".join(reported.logprobs.tokens) and plain.text.startswith(PROMPT)
    texts = reported.logprobs.tokens
    assert reported.logprobs.text_offset == [len("".join(texts[:at])) for at in range(len(texts))]
    chunks = [chunk.choices[0] for chunk in server.openai.completions.create(**ASKED, logprobs=1, stream=True)]
    parts = [(chunk.text, chunk.logprobs) for chunk in chunks if chunk.logprobs]
    assert len(parts) > 3 and all("".join(part.tokens) == text for text, part in parts)
    assert "".join(chunk.text for chunk in chunks) == reported.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for _, part in parts for each in getattr(part, name)] == getattr(reported.logprobs, name)


def test_a_prompt_alone_may_be_reported(server):
    tokens = tokens_of(server, "The old town")
    for prompt in (tokens, tokens[:1]):
        body = ASKED | {"prompt": prompt, "max_tokens": 0, "logprobs": 0}
        reported = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        assert [entry["id"] for entry in reported["content"]] == prompt and reported["token_logprobs"][0] is None
        assert all(logprob < 0 for logprob in reported["token_logprobs"][1:])


def test_control_tokens_are_spelt_in_a_prompt(server):
    end = min(server.service.model.ends)
    spelt = server.service.model.text_of(end)
    body = ASKED | {"prompt": [*tokens_of(server, "The sea"), end], "logprobs": 1}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["logprobs"]["tokens"][-4] == spelt and f"The sea{spelt}" in choice["text"]


def test_all_of_the_prompt_is_computed_and_nothing_is_left(server):
    num_tokens = len(tokens_of(server, PROMPT))
    cached = {"prompt": PROMPT, "max_tokens": 1, "cache_prompt": True, "cache_scope": "told"}
    server.http.post("/v1/completions", json=cached)
    before = [run["id"] for run in server.http.get("/v1/cache?scope=told").json()["runs"]]
    answer = server.http.post("/v1/completions", json=ASKED | cached | {"logprobs": 1}).json()
    assert answer["timings"]["prompt_n"] == num_tokens and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "log-probabilities" in answer["slotcache"]["miss"]["why"]
    assert [run["id"] for run in server.http.get("/v1/cache?scope=told").json()["runs"]] == before
    assert server.http.post("/v1/completions", json=cached).json()["timings"]["cache_n"] > num_tokens // 2


def test_many_at_once_with_other_streams(tiny):
    """Two of the long ones need more cells than there are, so some are paused: each token is told once, as alone."""
    with running(tiny, ctx_size=1024, parallel=4) as up:
        bodies = [ASKED | {"prompt": f"{number} {PROMPT}", "max_tokens": 40, "logprobs": 2} for number in range(8)]
        others = [{"prompt": f"{number} {PROMPT}", "max_tokens": 700, "ignore_eos": True} for number in range(4)]
        ask = partial(up.http.post, "/v1/completions")
        alone = [logprobs_of_prompt(up, body, ask(json=body).json()) for body in bodies]
        with ThreadPoolExecutor(len(bodies + others)) as pool:
            answers = list(pool.map(lambda body: ask(json=body).json(), bodies + others))
        for body, answer, (tokens, logprobs) in zip(bodies, answers, alone, strict=False):
            again = logprobs_of_prompt(up, body, answer)
            assert again[0] == tokens and again[1] == pytest.approx(logprobs, abs=0.5), "the steps have other sizes"
        assert up.metric("slotcache_preemptions_total") > 0


def test_several_choices_and_prompts(server):
    body = ASKED | {"prompt": ["The sea", "The old town"], "n": 2, "temperature": 2.0, "seed": 1, "logprobs": 1}
    choices = server.http.post("/v1/completions", json=body).json()["choices"]
    tokens = [tokens_of(server, text) for text in body["prompt"]]
    reported = [[entry["id"] for entry in choice["logprobs"]["content"]] for choice in choices]
    assert [each[: len(own)] for each, own in zip(reported, [tokens[0]] * 2 + [tokens[1]] * 2, strict=True)] == [
        tokens[0], tokens[0], tokens[1], tokens[1],
    ]  # fmt: skip


def test_what_a_harness_scores(server, reference):
    """The requests of lm-eval's local-completions, and how it reads them: the choice whose tokens are likeliest is taken."""
    context = tokens_of(server, "The river rises in")
    endings = [server.http.post("/tokenize", json={"content": text}).json()["tokens"] for text in (" the hills", " a cup")]
    prompts = [context + ending for ending in endings]
    body = {"model": "any", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = json.loads(server.http.post("/v1/completions", json=body).text)
    for choice, prompt in zip(sorted(answer["choices"], key=lambda choice: choice["index"]), prompts, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
        best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][len(context) : -1]]
        exact = reference(prompt)[len(context) - 1 :]
        expected = exact[np.arange(len(exact)), prompt[len(context) :]]
        assert sum(logprobs) == pytest.approx(expected.sum(), abs=1e-2)
        assert (logprobs == best) == bool((exact.argmax(1) == prompt[len(context) :]).all())


def test_a_whole_answer_lists_no_more_than_memory_holds(server):
    many = ASKED | {"prompt": [PROMPT] * 128, "n": 2, "n_probs": 100, "max_tokens": 0}
    answer = server.http.post("/v1/completions", json=many)
    assert answer.status_code == 400 and "at most 4,000,000" in answer.json()["error"]["message"]
