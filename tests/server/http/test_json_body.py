"""JSON that is not quite JSON: halves of characters, bytes that are no UTF-8, a byte-order mark."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.server.http import json_body
from slotcache.server.http.api_errors import RequestError
from slotcache.server.http.json_body import LONGEST_PATH, MARK, WINDOW, as_unicode

CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
PIECES = (r"\ud83d", r"\uDE00", r"\ude00", r"\uD83D", "\\\\", r"\"", r"\u0041", r"\ufffd", "a", "ud83d", "é", r"\n")


def whole(text):
    """A text as Python reads it, with U+FFFD for each half of a character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_each_lone_half_becomes_one_replacement_character(text):
    body = f'{{"{text}": ["{text}"]}}'
    mended = as_unicode(body.encode())
    assert len(mended) == len(body.encode())
    assert json.loads(mended) == {whole(name): [whole(one) for one in values] for name, values in json.loads(body).items()}


@pytest.mark.parametrize("text", [r"\ud83d", r"\ud83d\ude00", r"\ud83d\ud83d\ude00", r"\\ud83d", r"\\\ud83d\ude00"])
def test_they_are_found_across_the_windows_of_the_search(monkeypatch, text):
    for window in range(1, 40):
        monkeypatch.setattr(json_body, "WINDOW", window)
        body = f'["{text * 9}x{text}", "{text}"]'
        assert json.loads(as_unicode(body.encode())) == [whole(one) for one in json.loads(body)]


@pytest.mark.parametrize("unit", [r"\ud83d", r"\ud83d\ude00", "\\\\", r"\\ud83d", r"\udc00", r"\uD"])
def test_the_search_is_linear(unit):
    """Of a mebibyte; were it not, the suite would stand still."""
    body = b'["%b"]' % (unit.encode() * (4 * WINDOW // len(unit)))
    assert len(as_unicode(body)) == len(body)


def test_a_body_without_halves_is_not_copied():
    for body in (b"{}", '["é \\u00e9 \\\\ud83d"]'.encode(), b'["\\ud83d\\ude00"]'):
        assert as_unicode(body) is body


def test_a_mark_is_skipped_once():
    assert as_unicode(MARK + b"{}") == b"{}"
    assert as_unicode(MARK + MARK + b"{}") == MARK + b"{}"  # is no JSON


@pytest.mark.parametrize(
    ("body", "at", "field"),
    [
        (b'{"prompt": "a\xff"}', 13, "prompt"),
        (MARK + b'{"prompt": "a\xff"}', 16, "prompt"),
        (b'{"a": "\xc3\xa9", "messages": [{}, {"content": [{"text": "\xe2\x82"}]}]}', 52, "messages[1].content[0].text"),
        (b'{"messages": [{"\xff": 1}]}', 16, "messages[0]"),
        (b'{"\xff": 1}', 2, None),
        (b'{"a": "\xed\xa0\xbd"}', 7, "a"),
        (b"\xff\xfe{\x00}\x00", 0, None),
        (b'{"a": "\xff', 7, None),
        (b'["\xff"]', 2, "[0]"),
        (b'{"%b": "\xff"}' % (b"x" * 1000), 1006, "x" * LONGEST_PATH),
        (b'{"a": %b"\xff"%b}' % (b"[" * 100, b"]" * 100), 107, "a" + "[0]" * 7),
        (b'{"a": %b"\xff"%b}' % (b"[" * 50_000, b"]" * 50_000), 50_007, None),
    ],
)  # fmt: skip
def test_bytes_that_are_no_text_are_refused_with_their_place(body, at, field):
    with pytest.raises(RequestError, match=f"byte {at:,} of the body") as error:
        as_unicode(body)
    assert (error.value.status, error.value.param) == (400, field) and len(error.value.message) < 300


# ---- The routes. --------------------------------------------------------------------------------------------------------


def body_of(path, text):
    """A body whose text is given as JSON has it."""
    if path == RESPONSES:
        return f'{{"input": "{text}", "max_output_tokens": 1, "temperature": 0, "x-unknown": 1}}'
    message = f'{{"role": "user", "content": "{text}"}}'
    return f'{{"model": "tiny", "messages": [{message}], "max_tokens": 1, "temperature": 0, "stream": false}}'


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
def test_a_half_is_the_same_prompt_as_a_replacement_character(server, path):
    def answer(text):
        answer = server.http.post(path, content=body_of(path, text))
        assert answer.status_code == 200, answer.text
        said = answer.json()
        usage = said.get("usage") or {"tokens": said["prompt_eval_count"]}
        return usage.get("prompt_tokens") or usage.get("input_tokens") or usage["tokens"], said.get("warnings")

    assert answer(r"caf\u00e9 \ud83d and \ude00 end") == answer("café � and � end")


def test_a_history_with_a_half_is_found_again(server):
    first = [{"role": "user", "content": "a word " * 40 + "@"}]
    said = server.chat(messages=[{**first[0], "content": first[0]["content"].replace("@", "�")}])
    messages = [*first, said["choices"][0]["message"], {"role": "user", "content": "And?"}]
    body = json.dumps({"messages": messages, "max_tokens": 1, "cache_prompt": True}).replace("@", r"\ud83d")
    usage = server.http.post(CHAT, content=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > said["usage"]["prompt_tokens"] - 16


TEXTS = {
    "/v1/embeddings": "input", "/tokenize": "content", "/completion": "prompt", "/v1/completions": "prompt",
    "/api/generate": "prompt", "/infill": "input_prefix", "/v1/cache/warm": "prompt", "/v1/speculate": "id",
}  # fmt: skip


@pytest.mark.parametrize(("path", "field"), TEXTS.items())
def test_no_route_takes_a_half_for_what_is_no_json(server, path, field):
    for text in (r"a\ud83d", r"\u0000", r"\ud83d\ude00"):
        answer = server.http.post(
            path, content=f'{{"{field}": "{text}", "max_tokens": 1, "num_predict": 1, "n_predict": 1}}'
        )
        assert answer.status_code < 500 or answer.status_code == 501, answer.text
        assert "malformed_json" not in answer.text
    wrong = server.http.post(path, content=b'{"%b": "a\xff", "stream_options": {}}' % field.encode())
    assert wrong.status_code == (501 if path == "/v1/embeddings" and wrong.status_code == 501 else 400)
    assert f"in {field}, is 0xff" in wrong.text or wrong.status_code == 501


def test_a_mark_in_front_of_a_body_is_no_error(server):
    for path, body in (
        ("/tokenize", b'{"content": "Hi"}'),
        ("/lora-adapters", b"[]"),
        ("/lora-adapters", b'{"adapters": []}'),
    ):
        assert server.http.post(path, content=MARK + body).status_code == 200


def test_reasoning_that_was_kept_is_a_text(server):
    """No server has sealed half of a character: no tokens have one."""
    sealed = "slotcache:" + base64.b64encode("\ud83d".encode(errors="surrogatepass")).decode()
    item = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    answer = server.http.post(RESPONSES, json={"input": [{"role": "user", "content": "x"}, item], "max_output_tokens": 1})
    assert answer.status_code == 400 and "encrypted_content is damaged" in answer.text
    block = {"type": "thinking", "thinking": "", "signature": sealed}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}, {"role": "user", "content": "y"}]
    answer = server.http.post(MESSAGES, json={"model": "tiny", "messages": turns, "max_tokens": 1})
    assert answer.status_code == 400 and "signature is damaged" in answer.text
