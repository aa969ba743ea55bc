"""JSON that is not quite JSON: halves of characters, bytes that are no UTF-8, a byte-order mark; and too much of it."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.server.http import json_body
from slotcache.server.http.api_errors import RequestError
from slotcache.server.http.json_body import LONGEST_PATH, MARK, WINDOW, as_unicode, check_elements
from support.dialects import ALL

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
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


# ---- Elements. ----------------------------------------------------------------------------------------------------------

TEXT = st.text(st.sampled_from('[{,"\\/aé😀\ud83d'), max_size=6)
JSON = st.recursive(
    st.integers() | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)


def elements(value):
    """The brackets, the commas and the strings of a value as JSON."""
    if isinstance(value, str):
        return [0, 0, 1]
    if not isinstance(value, list | dict):
        return [0, 0, 0]
    inner = [elements(one) for one in (value.values() if isinstance(value, dict) else value)]
    sums = [sum(each) for each in zip(*inner, strict=True)] or [0, 0, 0]
    return [sums[0] + 1, sums[1] + max(len(inner) - 1, 0), sums[2] + (len(value) if isinstance(value, dict) else 0)]


@given(JSON, st.booleans(), st.integers(1, 40))
def test_what_stands_outside_strings_is_counted_and_no_more(value, is_ascii, window):
    text = json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "WINDOW", window)
        pieces = list(json_body.outside_strings(text))
    outside = b"".join(pieces)
    assert [outside.count(b"[") + outside.count(b"{"), outside.count(b",")] == elements(value)[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "WINDOW", len(text))
        assert b"".join(json_body.outside_strings(text)).count(b'"') == elements(value)[2]


MANY = json_body.MAX_BRACKETS + 1


@pytest.mark.parametrize(
    "text",
    [
        "[" * MANY,
        "," * (4 * MANY),
        '"' * (4 * json_body.MAX_TEXTS),
        '"": ' * (2 * json_body.MAX_TEXTS),
        r"\"" + "[" * MANY,
        r'"\\"' + "[" * MANY,
        r'"\\\"" ' + "[" * MANY,
        '"' + "x" * WINDOW + '"' + "[" * MANY,
        '"' + "\\" * WINDOW + '"' + "[" * MANY,
        '"' + r"\"" * WINDOW + '"' + "[" * MANY,
        "[" * (MANY // 2) + '"[' + "{" * MANY + '"' + "[" * (MANY // 2 + 1),
    ],
    ids=range(11),
)  # fmt: skip
def test_no_string_hides_elements(text):
    with pytest.raises(RequestError, match="expected at most") as error:
        check_elements(text.encode())
    assert error.value.status == 413


@pytest.mark.parametrize("mark", ["[", "{", ",", r"\u005b", r"\u002C", r"\"[", r"\\[", r"\\\"[", "\n{"])
@pytest.mark.parametrize("end", ['"}', ""])
def test_elements_in_a_text_do_not_count(mark, end):
    check_elements(b'{"content": "%b%b' % (mark.encode() * 5 * MANY, end.encode()))


LINES = "".join(f'{{"at": {number}, "tags": ["a", "b"], "said": "x"}}\n' for number in range(100_000))


def test_a_log_of_a_hundred_thousand_lines_of_json_is_a_text(server):
    """As a text, and as a tool's result, which is looked at for documents: it is too long, but nothing else is wrong."""
    result = [{"role": "tool", "tool_call_id": "1", "content": LINES}, {"role": "user", "content": "?"}]
    for messages in ([{"role": "user", "content": LINES}], result):
        for more in ({}, {"tool_documents": "auto"}):
            answer = server.http.post(CHAT, json={"messages": messages, "max_tokens": 1} | more)
            assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
    assert len(server.http.post("/tokenize", json={"content": LINES}).json()["tokens"]) > 100_000


def calls_of(arguments, number=1):
    calls = [{"id": str(at), "type": "function", "function": {"name": "f", "arguments": arguments}} for at in range(number)]
    asked = {"role": "user", "content": "?"}
    return [asked, {"role": "assistant", "content": "", "tool_calls": calls}, asked]


def test_the_arguments_of_calls_are_no_more_than_a_body(server):
    lists = '{"a": [%s1]}' % ("[]," * (MANY // 4))
    for messages in (calls_of('{"a": [%s1]}' % ("[]," * MANY)), calls_of(lists, 5)):
        error = server.http.post("/apply-template", json={"messages": messages})
        assert error.status_code == 413 and error.json()["error"]["param"] == "messages", error.text
    written = calls_of(json.dumps({"path": "log", "text": LINES}))
    answer = server.http.post("/apply-template", json={"messages": written})
    assert answer.json()["error"]["code"] == "context_length_exceeded", "as any text that is too long"


# ---- The routes. --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ALL, ids=str)
def test_a_half_is_the_same_prompt_as_a_replacement_character(server, api):
    def answer(text):
        body = json.dumps(api.body("@", most=1, stream=False, unknown=1)).replace("@", text)
        answer = server.http.post(api.path, content=body)
        assert answer.status_code == 200, answer.text
        return api.read(answer.json())

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
    assert answer.status_code == 200 and "reasoning (1)" in str(answer.json()["warnings"])
    block = {"type": "thinking", "thinking": "", "signature": sealed}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [block]}, {"role": "user", "content": "y"}]
    answer = server.http.post(MESSAGES, json={"model": "tiny", "messages": turns, "max_tokens": 1})
    assert answer.status_code == 200 and "d83d" not in answer.text
