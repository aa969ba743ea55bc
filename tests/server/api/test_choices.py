"""Several answers to one request: choices of one prompt, which share its prefill, and lists of prompts."""

import pytest

LONG = [{"role": "user", "content": "Tell me about the house by the sea. " * 40}]
OPTIONS = {"max_tokens": 6, "temperature": 1.5, "seed": 7, "ignore_eos": True}


def computed(answer):
    return sum(choice["timings"]["prompt_n"] for choice in answer["choices"])


@pytest.mark.parametrize("cache_prompt", [False, True])
def test_choices_compute_their_prompt_once(server, cache_prompt):
    """Each further choice computes only the last tokens, which are always computed."""
    for num_choices in (4, 6):  # 6: more than there are slots
        messages = [{"role": "user", "content": f"{num_choices}{cache_prompt} " + LONG[0]["content"]}]
        answer = server.chat(messages=messages, n=num_choices, cache_prompt=cache_prompt, **OPTIONS)
        assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
        assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
        usage, last = answer["usage"], server.service.context.costs.recompute_last
        assert usage["completion_tokens"] == 6 * num_choices
        assert computed(answer) <= usage["prompt_tokens"] + last * (num_choices - 1)
    cache = server.http.get("/v1/cache").json()
    assert cache_prompt or "False" not in str(cache)


def test_each_choice_is_the_answer_of_its_own_seed(server):
    together = server.chat(messages=LONG, n=3, **OPTIONS)
    for index, choice in enumerate(together["choices"]):
        alone = server.chat(messages=LONG, **OPTIONS | {"seed": 7 + index})
        assert alone["choices"][0]["message"] == choice["message"]


def test_streamed_choices_are_those_of_the_whole_answer(server):
    asked = {"model": "any", "messages": LONG, "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 6}
    extra = {"cache_prompt": True, "ignore_eos": True}
    whole = server.openai.chat.completions.create(**asked, extra_body=extra)
    texts, ends = ["", "", ""], []
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    chunk = None
    for chunk in server.openai.chat.completions.create(**asked, **usage, extra_body=extra):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2]
    assert chunk and chunk.usage.completion_tokens == whole.usage.completion_tokens == 18


def test_lists_of_prompts_are_answered_in_their_order(server):
    texts = ["The sea", "A house in the hills"]
    ids = [server.http.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"] for text in texts]
    alone = [server.openai.completions.create(model="any", prompt=text, max_tokens=5, temperature=0) for text in texts]
    expected = [answer.choices[0].text for answer in alone]
    for prompt in (texts, ids, [texts[0], ids[1]]):
        answer = server.openai.completions.create(model="any", prompt=prompt, max_tokens=5, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    mixed = server.openai.completions.create(model="any", prompt=[*ids[0], texts[1]], max_tokens=1)
    assert mixed.usage.prompt_tokens > len(ids[0])


def test_native_answers_to_several_prompts_are_a_list(server):
    answers = server.http.post("/completion", json={"prompt": ["a", "b"], "n_predict": 2, "ignore_eos": True}).json()
    assert [answer["index"] for answer in answers] == [0, 1]
    assert all(answer["timings"]["predicted_n"] == 2 for answer in answers)


def test_more_choices_than_may_be_open_are_refused(server):
    answer = server.http.post("/v1/completions", json={"prompt": ["a"] * 100, "n": 100})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
