"""What every API does alike: the answer, its end, its costs, its calls and its errors, whole and as a stream."""

import json
from contextlib import ExitStack
from itertools import chain

import jsonschema
import pytest
from support.dialects import ALL, CALLERS, CHAT, MESSAGES, NATIVE, TEXT, Ollama

from server.conftest import REST, blocked, running, until

every = pytest.mark.parametrize("api", ALL, ids=str)
either = pytest.mark.parametrize("way", ["whole", "streamed"])
ENDLESS = {"most": 1500, "stream": True}
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Oslo", "Rome"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "size"],
}


def opened(server, api, **fields):
    """A stream that is read while it comes."""
    return server.http.stream("POST", api.path, json=api.body(**ENDLESS | fields))


# ---- answers ------------------------------------------------------------------------------------------------------------


@either
@every
def test_an_answer_is_that_of_the_same_chat_or_text(server, api, way):
    first = CHAT if api.is_chat else TEXT
    said = getattr(api, way)(server, system="Be brief.")
    assert said == first.whole(server, system="Be brief.")
    assert said.text and (said.reason, said.word, said.num_generated, said.warnings) == ("length", None, 12, ())
    assert (said.num_prompt > first.whole(server).num_prompt) == api.is_chat


@every
def test_a_stream_comes_in_pieces(server, api):
    long, short = (len(api.events_of(api.ask(server, most=most, stream=True))) for most in (12, 1))
    assert long > short


@either
@every
def test_a_stop_string_ends_an_answer_and_is_named(server, api, way):
    text = api.whole(server).text
    stop = text[3:6]
    for given in (stop, ["never", stop]):
        said = getattr(api, way)(server, stop=given)
        assert (said.text, said.reason, said.word) == (text[: text.index(stop)], "stop", stop if api.names_word else None)


@every
def test_an_answer_ends_where_the_context_does(short, api):
    said = api.whole(short, most=4000)
    assert said.reason == "length" and said.num_prompt + said.num_generated == 256
    assert api is not MESSAGES or "model_context_window_exceeded" in api.ask(short, most=4000).text


@pytest.fixture(scope="module")
def short(tiny):
    with running(tiny, ctx_size=256) as up:
        yield up


@either
@pytest.mark.parametrize("api", CALLERS, ids=str)
def test_a_call_fits_its_schema(server, api, way):
    said = getattr(api, way)(server, most=300, **api.tools(get_weather=CITY))
    ((name, arguments),) = said.calls
    assert (name, said.text, said.reason) == ("get_weather", "", "calls")
    assert not said.warnings or isinstance(api, Ollama), "which has no field for one call at most"
    jsonschema.validate(arguments, CITY)
    assert said.calls == CHAT.whole(server, most=300, **CHAT.tools(get_weather=CITY)).calls


@either
@every
def test_a_field_that_is_not_known_is_named(server, api, way):
    (warning,) = getattr(api, way)(server, mistaken=1).warnings
    assert warning == "'mistaken' is not known; it has no effect"


def test_any_model_is_served_where_that_is_set(tiny, server):
    with running(tiny, any_model=True) as up:
        for api in ALL:
            assert "gpt-5" in api.ask(up, model="gpt-5", most=1, stream=False).json()["model"], api
        assert up.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).json()["model"] == "tiny"
        assert up.http.get("/v1/models/gpt-5").json()["id"] == "gpt-5"
        assert up.http.post("/api/show", json={"model": "gpt-5"}).status_code == 200
    for api in ALL:
        answer = api.ask(server, model="gpt-5", most=1, stream=False)
        assert api.refused(answer, 404) if isinstance(api, Ollama) else answer.json()["model"] == "tiny", api
    assert server.http.get("/v1/models/gpt-5").status_code == 404


# ---- the cache ----------------------------------------------------------------------------------------------------------


@either
@every
def test_a_prompt_is_found_again_within_its_scope(server, api, way):
    asked = {"cache_prompt": True, "most": 2}
    scopes = [f"{api} {way} {name}" for name in "aba"]
    found = [getattr(api, way)(server, "Sing of the river. " * 9, cache_scope=scope, **asked) for scope in scopes]
    assert [one.num_cached for one in found] == [0, 0, found[0].num_prompt - REST]


@pytest.mark.parametrize("caches", [True, False])
def test_the_cache_is_the_server_s_to_turn_on(tiny, caches):
    """A client may say nothing of it."""
    with running(tiny, cache_prompt=caches) as up:
        for api in ALL:
            again = [api.whole(up, most=2) for _ in "ab"][1]
            assert again.num_cached == (again.num_prompt - REST if caches else 0), api


# ---- errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@every
def test_what_is_wrong_is_refused_in_the_shape_of_the_api(server, api, stream):
    hot = api.refused(api.ask(server, temperature="hot", stream=stream))
    assert hot == "temperature: Expected `float | null`, got `str`"
    assert api.refused(api.ask(server, grammar="root ::= (", stream=stream)).startswith("grammar: Expected")
    assert api.refused(server.http.post(api.path, content='{"messages": [')).startswith("the body is not JSON")
    assert api.refused(server.http.request("PUT", api.path), 405) == f"{api.path} takes no PUT: expected POST"
    assert api.refused(server.http.post(f"{api.path}/no/such"), 404).startswith(f"no such route: {api.path}/no/such")


@every
def test_a_key_and_the_size_of_a_body_come_first(guarded, api):
    assert "Bearer" in api.refused(api.ask(guarded), 401)
    for name, value in (("Authorization", "Bearer secret"), ("X-Api-Key", "secret")):
        answer = guarded.http.post(api.path, json=api.body(most=1), headers={name: value})
        assert answer.status_code == 200, answer.text
    large = guarded.http.post(api.path, content=b"x" * (2 << 20), headers={"X-Api-Key": "secret"})
    assert "--max-body" in api.refused(large, 413)


@pytest.fixture(scope="module")
def guarded(tiny):
    with running(tiny, api_key="secret", max_body=1) as up:
        yield up


@every
def test_a_full_queue_is_reported_before_the_first_event_and_the_rest_finish(narrow, api):
    refused = narrow.metric("slotcache_requests_total", end="refused")
    with blocked(narrow) as go, opened(narrow, CHAT, most=2) as first:
        lines = first.iter_lines()  # kept: an iterator that is gone closes its stream
        first_line = next(lines)
        for stream in (False, True):
            answer = api.ask(narrow, stream=stream)
            assert "answers are running" in api.refused(answer, 429) and int(answer.headers["Retry-After"]) >= 1
        go.set()
        assert CHAT.join([*CHAT.events(chain([first_line], lines))]).num_generated == 2
    until(lambda: not narrow.service.open)
    assert narrow.metric("slotcache_requests_total", end="refused") == refused + 2


@pytest.fixture(scope="module")
def narrow(tiny):
    with running(tiny, parallel=1, max_queue=0) as up:
        yield up


def test_a_server_that_ends_informs_every_stream(tiny):
    with running(tiny, parallel=len(ALL), ctx_size=16384) as up, ExitStack() as stack:
        streams = [(api, api.events(stack.enter_context(opened(up, api)).iter_lines())) for api in ALL]
        for _, events in streams:
            next(events)
        up.service.engine.stop()
        for api, events in streams:
            *_, last = events
            assert api.failure(last, 503) and api.refused(api.ask(up), 503), api
        assert not up.service.open


@pytest.mark.parametrize("step", ["begin", "delta", "end", "close"])
@every
def test_a_stream_that_the_server_fails_in_ends_with_an_error_of_its_api(server, api, step, monkeypatch, caplog):
    """A connection that breaks off would be tried again by the clients of most APIs."""

    def fail(*given):
        raise KeyError("odd")

    monkeypatch.setattr(api.reply, step, fail)
    several = {"prompt": ["Hello", "there"], "n": 2} if api is TEXT else {}
    with opened(server, api, most=3, **several) as answer:
        assert answer.status_code == 200
        *sent, last = api.events(answer.iter_lines())
    assert api.failure(last).startswith("the server failed") and "the server failed" not in json.dumps(sent)
    has_ended = any(choice.get("finish_reason") for event in sent for choice in event.get("choices", ()))
    assert not has_ended or step == "close"
    assert "KeyError: 'odd'" in caplog.text
    until(lambda: not server.service.open)


# ---- streams that wait --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [None, -1], ids=["pings", "none"])
@every
def test_a_stream_begins_before_its_prompt_is_computed(fast, api, interval):
    """And is never silent for long: parsers of some APIs drop comments, so they get events."""
    with blocked(fast) as go, opened(fast, api, most=1, sse_ping_interval=interval) as answer:
        lines = filter(None, answer.iter_lines())
        begins = 4 if api.has_names else 1
        pings = 0 if interval else 2 if api.has_names else 1
        early = [next(lines) for _ in range(begins + pings)]
        go.set()
        said = api.join([*api.events(chain(early, lines))])
    assert said == api.whole(fast, most=1) and (api is not NATIVE or early[0] == ":")


@pytest.fixture(scope="module")
def fast(tiny):
    """A server whose pings come much faster than a client may ask for."""
    with running(tiny, sse_ping_interval=0.02) as up:
        yield up


@every
def test_a_client_that_goes_away_frees_its_slot(server, api):
    cancelled = server.metric("slotcache_requests_total", end="cancelled")
    with opened(server, api) as answer:
        lines = answer.iter_lines()
        next(lines)
    until(lambda: not server.service.open)
    until(lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json()))
    assert server.metric("slotcache_requests_total", end="cancelled") == cancelled + 1


def test_ollama_s_answers_are_streams_unless_a_request_says_otherwise(server):
    for api in (one for one in ALL if isinstance(one, Ollama)):
        assert api.join(api.events_of(api.ask(server))) == api.whole(server)
        assert "stream" not in api.body()
