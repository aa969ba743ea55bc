"""Ollama's API over a real port."""

import json
from datetime import UTC, datetime

import jsonschema
import numpy as np
import pytest
from slotcache.server.api.ollama import OllamaMessage, messages_of, seconds_of
from slotcache.server.chat.body import ChatRequest
from slotcache.server.chat.content import take
from slotcache.server.http.api_errors import RequestError
from support.encoders import bert
from support.on_device import ROUNDING, loads_two

from server.conftest import running, until

HELLO = {"role": "user", "content": "Tell me of the town."}
GREEDY = {"temperature": 0, "num_predict": 12, "ignore_eos": True}
USUAL = {"model": "tiny", "options": GREEDY}


@pytest.fixture(scope="module")
def both(tiny, tmp_path_factory):
    """A server of a model that generates, with an encoder beside it, under two names."""
    encoder = bert(tmp_path_factory.mktemp("models") / "bert.gguf")
    with running(tiny, embedding_model=str(encoder), alias="town,town:small", sleep_idle_seconds=3600) as up:
        yield up


def post(server, path="/api/chat", **fields):
    usual = {"messages": [HELLO]} if path == "/api/chat" else {"prompt": HELLO["content"]} if path == "/api/generate" else {}
    return server.http.post(path, json=USUAL | usual | fields)


def whole(server, path="/api/chat", **fields):
    answer = post(server, path, stream=False, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(server, path="/api/chat", **fields):
    answer = post(server, path, **fields)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(server, path="/api/chat", status=400, **fields):
    answer = post(server, path, **fields)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return answer.json()["error"]


def text_of(answer):
    return answer["message"]["content"] if "message" in answer else answer["response"]


def test_an_answer_has_its_times_and_the_name_of_its_model(server):
    answer = whole(server)
    assert answer["message"].keys() == {"role", "content"} and answer["message"]["role"] == "assistant"
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("tiny", True, "length")
    times = [answer[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert all(type(time) is int for time in times) and 0 < sum(times) <= answer["total_duration"]
    assert datetime.fromisoformat(answer["created_at"]) <= datetime.now(UTC)


def test_a_raw_prompt_is_the_whole_of_it(server):
    answer = whole(server, "/api/generate", prompt="The town", raw=True)
    fields = {"prompt": "The town", "temperature": 0, "n_predict": 12, "ignore_eos": True}
    native = server.http.post("/completion", json=fields).json()
    assert (answer["response"], answer["prompt_eval_count"]) == (native["content"], native["tokens_evaluated"])


OPTIONS = {
    "temperature": 0.3, "top_k": 3, "top_p": 0.4, "min_p": 0.2, "typical_p": 0.5, "repeat_penalty": 1.5, "repeat_last_n": 9,
    "presence_penalty": 0.5, "frequency_penalty": 0.7, "seed": 7, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2,
}  # fmt: skip


def test_options_are_the_fields_of_a_completion(server):
    """`/slots` shows those of a request that runs."""
    asked = {"messages": [HELLO], "options": OPTIONS | {"num_predict": 4000, "ignore_eos": True}}
    with server.http.stream("POST", "/api/chat", json=USUAL | asked) as stream:
        reported = stream.iter_lines()  # kept: an iterator that is gone closes its stream
        _, _ = next(reported), next(reported)  # the line that comes at once, and a piece
        (params,) = [slot["params"] for slot in server.http.get("/slots").json() if slot["is_processing"]]
    assert {name: params[name] for name in OPTIONS} == pytest.approx(OPTIONS)
    until(lambda: not server.service.open)


@pytest.mark.parametrize(("num_predict", "length"), [(3, 3), (0, None), (-1, None), (-2, None)])
def test_an_answer_has_a_length_or_fills_the_context(tiny_and_short, num_predict, length):
    answer = whole(tiny_and_short, options=GREEDY | {"num_predict": num_predict})
    assert answer["eval_count"] == (length or 256 - answer["prompt_eval_count"]) and answer["done_reason"] == "length"


@pytest.fixture(scope="module")
def tiny_and_short(tiny):
    with running(tiny, ctx_size=256) as up:
        yield up


WARNED = [
    ({"options": GREEDY | {"num_ctx": 1 << 20}}, "options.num_ctx is 1,048,576: a request may have 8,192 tokens"),
    ({"options": GREEDY | {"num_predct": 5}}, "'options.num_predct' is not known (did you mean options.num_predict?)"),
    ({"options": GREEDY | {"penalize_newline": True}}, "options.penalize_newline has no effect"),
    ({"keep_alive": "5m"}, "keep_alive has no effect"),
    ({"keep_alive": 0}, "keep_alive has no effect"),
    ({"think": True}, "think has no effect"),
    ({"think": "high"}, "think has no effect"),
    ({"truncate": True}, "truncate has no effect"),
    ({"shift": True}, "shift has no effect"),
    ({"widht": 3}, "'widht' is not known"),
]


@pytest.mark.parametrize(("fields", "says"), WARNED)
def test_what_has_no_effect_is_named(server, fields, says):
    (warning,) = whole(server, **fields)["warnings"]
    assert warning.startswith(says)
    assert lines(server, **fields)[-1]["warnings"] == [warning]


@pytest.mark.parametrize(
    "fields",
    [
        {"options": GREEDY | {"num_ctx": 4096, "num_gpu": 1, "num_thread": 2, "use_mmap": True, "num_batch": 64}},
        {"keep_alive": -1},
        {"keep_alive": "-1m"},
        {"think": False},
        {"truncate": False, "shift": False},
        {"format": "", "tools": [], "keep_alive": None, "think": None},
    ],
)
def test_what_is_so_here_anyway_is_not(server, fields):
    assert "warnings" not in whole(server, **fields)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Oslo", "Rome"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "size"],
}


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_fits_the_format(server, path):
    said = json.loads(text_of(whole(server, path, format=SCHEMA, options={"num_predict": 200})))
    jsonschema.validate(said, SCHEMA)
    assert text_of(whole(server, path, format="json", options=GREEDY)).startswith("{")


TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"a": 1}}}]}


def test_a_history_with_calls_is_the_prompt_of_openai_s(server):
    """The result belongs to the call by its tool's name, or by its place."""
    call = {"id": "call00100", "type": "function", "function": {"name": "get_weather", "arguments": '{"a":1}'}}
    result = {"role": "tool", "content": "Rain.", "tool_call_id": "call00100", "name": "get_weather"}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    wanted = server.chat(messages=[HELLO, said, result], tools=[TOOL], cache_prompt=False)["usage"]["prompt_tokens"]
    for fields in ({}, {"tool_name": "get_weather"}, {"tool_call_id": "call00100"}):
        messages = [HELLO, CALLED, {"role": "tool", "content": "Rain."} | fields]
        assert whole(server, messages=messages, tools=[TOOL])["prompt_eval_count"] == wanted


def test_results_belong_to_calls_by_name_and_order():
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("look", "find", "look", "find")]
    results = [
        OllamaMessage("tool", "1", tool_name="find"),
        OllamaMessage("tool", "2"),
        OllamaMessage("tool", "3", tool_name="look"),
        OllamaMessage("tool", "4", tool_name="none"),
        OllamaMessage("tool", "5"),
        OllamaMessage("tool", "6"),
    ]
    said = messages_of([OllamaMessage("assistant", tool_calls=calls), *results])
    _, *shown = take(ChatRequest(messages=said))[0].messages
    assert [one.get("tool_call_id") for one in shown] == ["call00001", "call00000", "call00002", None, "call00003", None]


def test_many_results_that_no_call_waits_for():
    """Each was looked for among all calls."""
    calls = [{"function": {"name": "a"}}] * 50_000
    said = [OllamaMessage("assistant", tool_calls=calls), *[OllamaMessage("tool", "", tool_name="b")] * 50_000]
    assert len(take(ChatRequest(messages=messages_of(said)))[0].messages) == 50_001


def test_an_answer_that_has_started_goes_on(server):
    partial = [HELLO, {"role": "assistant", "content": "The town"}]
    chat = server.chat(messages=partial, max_tokens=12, echo=False, cache_prompt=False)
    assert text_of(whole(server, messages=partial)) == chat["choices"][0]["message"]["content"]


def test_logprobs(server):
    answer = whole(server, logprobs=True, top_logprobs=2)
    assert len(answer["logprobs"]) == 12 and all(len(token["top_logprobs"]) == 2 for token in answer["logprobs"])
    assert "".join(token["token"] for token in answer["logprobs"]) == text_of(answer)
    streamed = [token for line in lines(server, logprobs=True, top_logprobs=2) for token in line.get("logprobs", ())]
    assert [token["token"] for token in streamed] == [token["token"] for token in answer["logprobs"]]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
)


def test_a_model_thinks_where_a_request_asks(tiny, tmp_path):
    (tmp_path / "template.jinja").write_text(THINKING)
    with running(tiny, chat_template_file=str(tmp_path / "template.jinja")) as up:
        assert "thinking" in post(up, "/api/show").json()["capabilities"]
        counts = {think: whole(up, think=think)["prompt_eval_count"] for think in (None, True, False, "low")}
        assert counts[None] == counts[True] < min(counts[False], counts["low"])
        thought = whole(up)["message"]
        assert thought["thinking"] and thought["content"] == "" and "warnings" not in whole(up, think="high")
        assert "".join(line["message"].get("thinking", "") for line in lines(up)) == thought["thinking"]
        assert "thinking" not in whole(up, think=False)["message"]
        history = [HELLO, {"role": "assistant", "content": "Hi.", "thinking": "They greet. " * 9}, HELLO]
        plain = [HELLO, {"role": "assistant", "content": "Hi."}, HELLO]
        assert whole(up, messages=history)["prompt_eval_count"] > whole(up, messages=plain)["prompt_eval_count"] + 9


def test_an_image_is_refused_in_the_question_and_replaced_in_the_history(server):
    shown = HELLO | {"images": ["aGk="]}
    assert refused(server, messages=[shown]).startswith("messages[0].images: image input is not supported")
    for before in (shown, shown | {"content": [{"type": "text", "text": "Look."}]}, shown | {"content": None}):
        answer = whole(server, messages=[before, {"role": "assistant", "content": "A town."}, HELLO])
        assert "image (1)" in answer["warnings"][0]
    assert refused(server, "/api/generate", images=["aGk="]).startswith("images: image input is not supported")


REFUSED = [
    ("/api/chat", {"format": "yaml"}, "format is 'yaml': expected json or a JSON schema"),
    ("/api/chat", {"format": "json", "grammar": 'root ::= "a"'}, "format: another field"),
    ("/api/chat", {"keep_alive": "soon"}, "keep_alive is 'soon': expected seconds"),
    ("/api/chat", {"messages": [], "keep_alive": "soon"}, "keep_alive is 'soon': expected seconds"),
    ("/api/chat", {"options": {"top_k": "many"}}, "options.top_k: Expected `int"),
    ("/api/chat", {"messages": [{"content": "?"}]}, "messages[0].role is None"),
    ("/api/chat", {"messages": [{"role": "king", "content": "?"}]}, "messages[0].role is 'king'"),
    ("/api/chat", {"model": ""}, "model is required"),
    ("/api/chat", {"n": 2}, "there is one answer"),
    ("/api/generate", {"context": [1, 2]}, "context: this server's answers have no context"),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template: this server reads no Go templates"),
    ("/api/generate", {"raw": True, "system": "Sing."}, "raw: "),
    ("/api/generate", {"suffix": "Sing.", "think": True}, "raw: "),
    ("/api/create", {"from": "a"}, "this server makes, copies and deletes no models"),
    ("/api/copy", {"source": "a", "destination": "b"}, "this server makes, copies and deletes no models"),
    ("/api/push", {}, "this server makes, copies and deletes no models"),
]


@pytest.mark.parametrize(("path", "fields", "says"), REFUSED)
def test_what_is_not_here_is_refused_in_ollama_s_shape(server, path, fields, says):
    assert refused(server, path, **fields).startswith(says)


def test_models_are_deleted_elsewhere(server):
    answer = server.http.request("DELETE", "/api/delete", json={"model": "tiny"})
    assert answer.status_code == 400 and "slotcache serve -m FILE" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "status"), [("/api/unknown", 404), ("/api/blobs/sha256:1", 404), ("/api/tags", 405), ("/api/pull", 404)]
)
def test_routes_that_are_not_here_are_refused_in_ollama_s_shape(server, path, status):
    refused(server, path, status, model="none")


# ---- models -----------------------------------------------------------------------------------------------------------


def test_models_are_listed_by_each_of_their_names(both):
    listed = both.http.get("/api/tags").json()["models"]
    assert [each["name"] for each in listed] == ["town:latest", "town:small", "bert:latest"]
    assert listed[0] | {"name": 0, "model": 0} == listed[1] | {"name": 0, "model": 0}
    assert listed[0]["size"] > 0 and len(listed[0]["digest"]) == 64 and listed[0]["digest"] != listed[2]["digest"]
    assert listed[0]["details"]["format"] == "gguf" and listed[0]["details"]["family"] == "llama"
    assert listed[0]["details"]["parameter_size"].endswith("M") and " " not in listed[0]["details"]["quantization_level"]
    assert datetime.fromisoformat(listed[0]["modified_at"]) <= datetime.now(UTC)


@pytest.mark.parametrize("name", ["town", "town:latest", "town:small"])
def test_a_model_answers_to_its_names_with_and_without_latest(both, name):
    assert whole(both, model=name)["model"] == name


def test_an_unknown_model_is_refused_with_those_there_are(both):
    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"):
        error = refused(both, path, 404, model="none:7b")
        assert error == "no model 'none:7b' is served here: expected town:latest, town:small, bert:latest"
    assert refused(both, model="bert") == "'bert' does not support chat here: expected town:latest"
    assert refused(both, "/api/embed", model="town") == "'town' does not support embed here: expected bert:latest"


def test_show_reports_what_a_client_chooses_by(both):
    shown = post(both, "/api/show", model="town").json()
    assert shown["capabilities"] == ["completion", "tools"] and "messages" in shown["template"]
    assert shown["model_info"]["general.architecture"] == "llama" and shown["model_info"]["llama.context_length"] == 8192
    assert dict(line.split() for line in shown["parameters"].splitlines())["temperature"] == "0.8"
    assert shown["details"] == both.http.get("/api/tags").json()["models"][0]["details"]
    assert post(both, "/api/show", model="", name="bert").json()["capabilities"] == ["embedding"]


def test_a_pull_of_a_served_model_is_done_at_once(both):
    assert [json.loads(line) for line in post(both, "/api/pull", model="town").text.splitlines()] == [{"status": "success"}]
    assert "slotcache serve -m FILE" in refused(both, "/api/pull", 404, model="none")


def test_the_version_is_one_that_clients_can_compare(server):
    reported = server.http.get("/api/version").json()
    assert [int(part) for part in reported["version"].split(".")] >= [0, 13, 4] and reported["slotcache"], "of `codex --oss`"


@pytest.mark.parametrize("ui", [True, False])
def test_clients_are_informed_that_it_runs(tiny, ui):
    with running(tiny, ui=ui) as up:
        json_client, browser = {"Accept": "application/json"}, {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        assert up.http.get("/", headers=json_client).text == "Ollama is running"
        assert up.http.head("/", headers=json_client).status_code == 200
        page = up.http.get("/", headers=browser)
        assert page.status_code == (200 if ui else 404) and "Ollama" not in page.text


# ---- vectors ----------------------------------------------------------------------------------------------------------


def test_vectors_are_openai_s(both):
    texts = ["a river", "a stone"]
    data = both.http.post("/v1/embeddings", json={"input": texts}).json()
    wanted = [entry["embedding"] for entry in data["data"]]
    answer = post(both, "/api/embed", model="bert", input=texts).json()
    one = post(both, "/api/embed", model="bert", input="a river").json()["embeddings"]
    for given, vectors in ((answer["embeddings"], wanted), (one, wanted[:1])):
        assert np.array(given) == pytest.approx(np.array(vectors), rel=0, abs=ROUNDING)
    assert answer["prompt_eval_count"] == data["usage"]["prompt_tokens"]
    assert len(post(both, "/api/embed", model="bert", input="a river", dimensions=8).json()["embeddings"][0]) == 8
    assert post(both, "/api/embed", model="bert", input="").json()["embeddings"] == []
    assert post(both, "/api/embed", model="bert", input=[]).json()["embeddings"] == []


def test_a_text_that_is_too_long_is_cut_unless_a_request_says_otherwise(both):
    long = "river " * 2000
    assert len(post(both, "/api/embed", model="bert", input=long).json()["embeddings"]) == 1
    assert "too large" in refused(both, "/api/embed", model="bert", input=long, truncate=False)


def test_the_older_route_has_one_vector_as_the_model_made_it(both):
    one = post(both, "/api/embeddings", model="bert", prompt="a river").json()["embedding"]
    raw = both.http.post("/embeddings", json={"content": "a river", "embd_normalize": -1}).json()[0]["embedding"][0]
    assert one == raw
    assert post(both, "/api/embeddings", model="bert", prompt="").json()["embedding"] == []


def test_a_server_without_an_embedder_says_how_to_get_one(server):
    assert "--embedding-model FILE" in refused(server, "/api/embed", 501, input="a")


@loads_two
def test_an_embedder_that_stays_in_memory_says_so(tiny, tmp_path):
    with running(tiny, embedding_model=str(bert(tmp_path / "bert.gguf"))) as up:
        for path, text in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
            for said in ("a river", ""):
                fields = {"model": "bert", text: said}
                (reported,) = post(up, path, **fields, keep_alive="5m").json()["warnings"]
                assert reported.startswith("keep_alive has no effect")
                for kept in (-1, None):
                    assert "warnings" not in post(up, path, **fields, keep_alive=kept).json()


# ---- keep_alive -------------------------------------------------------------------------------------------------------


def loaded(server):
    return [each["name"] for each in server.http.get("/api/ps").json()["models"]]


def test_a_model_is_kept_as_long_as_a_request_says(both):
    def left():
        (ends,) = [each["expires_at"] for each in both.http.get("/api/ps").json()["models"] if each["name"] == "town:small"]
        return (datetime.fromisoformat(ends) - datetime.now(UTC)).total_seconds()

    for keep_alive, least, most in (("10m", 500, 600), (-1, 1e9, 1e10), (300, 200, 300), (None, 3500, 3600)):
        whole(both, model="town", keep_alive=keep_alive)
        assert least < left() <= most + 1, keep_alive
    assert both.http.get("/api/ps").json()["models"][0]["context_length"] == 8192


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_model_is_unloaded_at_once_and_comes_back(both, path):
    asked = {"model": "town", "messages": []} if path == "/api/chat" else {"model": "town", "prompt": ""}
    before = text_of(whole(both, path, model="town", keep_alive=0))
    until(lambda: "town:latest" not in loaded(both))
    for fields, reason in (({}, "load"), ({"keep_alive": 0}, "unload")):
        answer = post(both, path, **asked, **fields).json()
        assert (answer["done"], answer["done_reason"], text_of(answer)) == (True, reason, "")
        until(lambda reason=reason: ("town:latest" in loaded(both)) == (reason == "load"))
    assert text_of(whole(both, path, model="town")) == before and "town:latest" in loaded(both)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0), (30, 30), (1.5, 1.5), (-1, float("inf")), ("5m", 300), ("1h30m", 5400), ("-1", float("inf")), ("0", 0),
        ("1.5h", 5400), ("300ms", 0.3), ("10", 10), ("-5m", float("inf")), (1e300, 365 * 86400), ("9" * 60, 365 * 86400),
    ],
)  # fmt: skip
def test_durations_are_go_s(given, seconds):
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "-", "soon", "5 m", "m", "1d", "--5m", "5m!", "1h" * 50])
def test_what_is_no_duration_is_refused(given):
    with pytest.raises(RequestError, match="expected seconds, or a duration"):
        seconds_of(given)
