"""Text to tokens and back, in the forms of llama-server."""

import pytest

from server.conftest import running

TEXT = "Grüße aus Köln 媽 🤗"


def ask(server, path, **body):
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_pieces_are_the_texts_of_tokens_or_their_bytes(server):
    tokens = ask(server, "/tokenize", content=TEXT)["tokens"]
    pieces = ask(server, "/tokenize", content=TEXT, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    kinds = {type(piece["piece"]) for piece in pieces}
    assert kinds == {str, list}, "a byte-level vocabulary cuts a character that it does not know"
    spelt = b"".join(text.encode() if isinstance(text := piece["piece"], str) else bytes(text) for piece in pieces)
    assert spelt.decode() == TEXT


def test_control_tokens_are_spelt(server):
    text = "<|im_start|>user"
    tokens = ask(server, "/tokenize", content=text)["tokens"]
    assert ask(server, "/detokenize", tokens=tokens)["content"] == text
    assert ask(server, "/tokenize", content=text, with_pieces=True)["tokens"][0]["piece"] == "<|im_start|>"


def test_texts_and_ids_are_joined(server):
    hello, world = (ask(server, "/tokenize", content=text)["tokens"] for text in ("Hello", " world"))
    joined = ask(server, "/tokenize", content=["Hello", *world, 7, "Hello", " world"])["tokens"]
    assert joined == [*hello, *world, 7, *hello, *world]
    assert ask(server, "/tokenize", content=[])["tokens"] == []


@pytest.mark.parametrize("wrong", [-1, 1 << 30, {}, True, 1.5])
def test_a_wrong_part_is_named(server, wrong):
    answer = server.http.post("/tokenize", json={"content": ["a", wrong]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "content[1]"


def test_a_prompt_may_mix_texts_and_ids(server):
    hello = ask(server, "/tokenize", content="Hello")["tokens"]
    asked = {"temperature": 0, "n_predict": 4}
    whole = ask(server, "/completion", prompt="HelloHello", **asked)
    for prompt in (["Hello", *hello], [*hello, "Hello"], [*hello, *hello], {"prompt_string": "HelloHello"}):
        mixed = ask(server, "/completion", prompt=prompt, **asked)
        assert mixed["timings"]["prompt_n"] == 2 * len(hello)
        if prompt == [*hello, *hello]:
            assert whole["timings"]["prompt_n"] <= 2 * len(hello)
    image = {"prompt_string": "a", "multimodal_data": ["b"]}
    assert server.http.post("/completion", json={"prompt": image}).status_code == 400


def test_the_text_of_a_chat_is_a_prompt_of_the_same_tokens(tiny):
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for begins in (False, True):
        with running(tiny) as server:
            tokenizer = server.service.model.tokenizer
            if begins:  # as if this model wanted it
                tokenizer.begin = tokenizer("<|endoftext|>", special=True)
            shown = ask(server, "/apply-template", **chat)
            assert not shown["prompt"].startswith("<|endoftext|>")
            length = ask(server, "/v1/chat/completions", **chat, max_tokens=1)["usage"]["prompt_tokens"]
            assert length == ask(server, "/completion", prompt=shown["prompt"], n_predict=1)["tokens_evaluated"]
            assert length == shown["n_tokens"]
