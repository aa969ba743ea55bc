"""What llama-server's routes show of a server: properties, models, slots, and that of a request."""

import hashlib
import json
import logging

import pytest
from support.on_device import loads_two

from server.conftest import running, until

LONG = {"prompt": "Once upon a time", "n_predict": 4000, "ignore_eos": True, "cache_prompt": True}
SHORT = LONG | {"n_predict": 4, "temperature": 0}


@pytest.fixture(scope="module")
def named(tiny):
    with running(tiny, parallel=2, alias="tiny-2,fim,code", tags="chat,small", temperature=0.5, seed=42, predict=7) as up:
        yield up


def slots(server):
    return server.http.get("/slots").raise_for_status().json()


def complete(server, **fields):
    answer = server.http.post("/completion", json=SHORT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_properties_have_llama_server_s_fields(named):
    shown = named.http.get("/props").json()
    assert shown["total_slots"] == 2 and shown["model_path"].endswith("tiny.gguf") and shown["model_alias"] == "code"
    settings = shown["default_generation_settings"]
    assert settings["n_ctx"] == 8192
    assert (settings["params"]["temperature"], settings["params"]["seed"], settings["params"]["n_predict"]) == (0.5, 42, 7)
    caps = shown["chat_template_caps"]
    assert caps["supports_system_role"] and caps["supports_string_content"] and len(caps) == 9
    assert shown["modalities"] == {"vision": False, "video": False, "audio": False}
    assert (shown["endpoint_slots"], shown["endpoint_metrics"], shown["endpoint_props"]) == (True, True, False)
    assert shown["build_info"].startswith("b") and shown["is_sleeping"] is False and shown["model_ftype"]


def test_the_template_s_digest_is_in_the_log_and_in_the_properties(tiny, tmp_path, caplog):
    """The digest says which template it is, where a model's file and its author's page have several."""
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    found = {}
    for given, settings in (
        ("the model's file", {}),
        ("--chat-template", {"chat_template": "llama3"}),
        ("--chat-template-file", {"chat_template_file": str(file)}),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "slotcache"), running(tiny, **settings) as server:
            shown = server.http.get("/props").json()
        digest = hashlib.sha256(shown["chat_template"].encode()).hexdigest()
        assert shown["chat_template_digest"] == f"sha256:{digest}"
        (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("chat template"))
        assert line == f"chat template of {given}: {len(shown['chat_template']):,} characters, sha256 {digest}"
        found[given] = digest
    assert len(set(found.values())) == 3
    assert found["--chat-template-file"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_properties_show_the_device_and_its_costs(named):
    device = named.http.get("/props").json()["device"]
    assert set(device) == {"name", "description", "devices", "times", "costs", "unused"} and device["costs"]["chunk"] == 64
    assert device["costs"]["apart_from_cells"] is None, "never"
    assert device["times"] is None, "no device of the tests is timed"


def test_properties_are_changed_nowhere(named, tiny):
    refused = named.http.post("/props", json={})
    assert refused.status_code == 501 and "--props" in refused.json()["error"]["message"]
    with running(tiny, props=True) as server:
        before = server.http.get("/props").json()
        assert server.http.post("/props", json={"model_alias": "x"}).json() == {"success": True}
        assert server.http.get("/props").json() == before and before["endpoint_props"]


def test_models_are_listed_with_names_tags_and_sizes(named):
    listed = named.http.get("/models").json()
    (entry,), (ollama,) = listed["data"], listed["models"]
    assert entry["id"] == "code" and entry["aliases"] == ["code", "fim", "tiny-2"] and entry["tags"] == ["chat", "small"]
    assert entry["meta"]["n_ctx"] == 8192 and entry["meta"]["n_embd"] == 128 and entry["created"] > 1_600_000_000
    assert ollama["name"] == ollama["model"] == "code" and ollama["capabilities"] == ["completion"]
    for name in ("code", "fim", "tiny-2"):
        assert named.openai.models.retrieve(name).id == "code"
    missing = named.http.get("/v1/models/gpt-5")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_without_an_alias_the_file_names_the_model(server):
    assert [model.id for model in server.openai.models.list()] == ["tiny"]


@loads_two
def test_every_answer_and_chunk_has_the_fingerprint_of_the_server(named, tiny):
    messages = [{"role": "user", "content": "Hi"}]
    prints = {named.openai.chat.completions.create(model="m", messages=messages, max_tokens=2).system_fingerprint}
    prints |= {named.openai.completions.create(model="m", prompt="Hi", max_tokens=2).system_fingerprint}
    stream = named.openai.chat.completions.create(
        model="m", messages=messages, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    prints |= {chunk.system_fingerprint for chunk in stream}
    prints |= {
        chunk.system_fingerprint
        for chunk in named.openai.completions.create(model="m", prompt="Hi", max_tokens=2, stream=True)
    }
    assert len(prints) == 1 and (reported := prints.pop()).startswith("b")
    with running(tiny, parallel=3, port=0) as same, running(tiny, cache_type_k="f32", cache_type_v="f32", port=0) as other:
        assert [up.service.fingerprint == reported for up in (same, other)] == [True, False]


def test_an_idle_slot_shows_no_task_before_its_first(tiny):
    with running(tiny, parallel=2) as server:
        assert all(set(slot) == {"id", "n_ctx", "speculative", "is_processing", "sequence"} for slot in slots(server))
        complete(server, id_slot=1)
        fresh, used = slots(server)
        assert "id_task" not in fresh and used["id_task"] >= 0 and used["n_prompt_tokens"] > 4
        assert used["next_token"] == [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}]


def read_text(lines):
    """Read up to the first text: a stream begins before its prompt has a slot."""
    next(line for line in lines if line.startswith("data: "))


def test_a_busy_slot_shows_its_task_and_no_text(named):
    texts = {"dry_multiplier": 0.1, "dry_sequence_breakers": ["hidden"], "logit_bias": {"hidden": 0.1}}
    with named.http.stream("POST", "/completion", json=LONG | texts | {"stream": True, "id_slot": 1, "top_k": 7}) as answer:
        lines = answer.iter_lines()
        read_text(lines)
        slot = slots(named)[1]
        assert slot["is_processing"] and slot["params"]["top_k"] == 7 and slot["n_prompt_tokens_processed"] > 0
        assert slot["next_token"][0]["has_next_token"] and slot["next_token"][0]["n_decoded"] > 0
        assert slot["next_token"][0]["n_remain"] + slot["next_token"][0]["n_decoded"] == 4000
        shown = json.dumps(slots(named))
        assert "Once" not in shown and "hidden" not in shown and "logit_bias" not in shown
        assert named.http.get("/slots?fail_on_no_slot=1").status_code == 200
        with named.http.stream("POST", "/completion", json=LONG | {"stream": True}) as second:
            more = second.iter_lines()
            read_text(more)
            full = named.http.get("/slots?fail_on_no_slot=1")
            assert full.status_code == 503 and full.json()["error"]["type"] == "unavailable_error"
    until(lambda: not any(slot["is_processing"] for slot in slots(named)))


def test_a_request_runs_on_the_slot_that_it_names(named):
    for number in (1, 0, 1, 1, 0):
        assert complete(named, id_slot=number)["slotcache"]["slot"] == number
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "id_slot": 1, "n": 2}
    answer = named.http.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["slotcache"]["slot"] == 1
    for wrong in (2, 10**12, -2, "1"):
        error = named.http.post("/completion", json=SHORT | {"id_slot": wrong}).json()["error"]
        assert error["code"] == 400 and error["param"] == "id_slot"


def test_a_request_waits_for_its_slot_while_others_go_by(named):
    with named.http.stream("POST", "/completion", json=LONG | {"stream": True, "id_slot": 1}) as answer:
        lines = answer.iter_lines()
        read_text(lines)
        with named.http.stream("POST", "/completion", json=SHORT | {"stream": True, "id_slot": 1}) as waiting:
            until(lambda: named.metric("slotcache_requests_waiting") == 1)
            assert [complete(named)["slotcache"]["slot"] for _ in range(3)] == [0] * 3
            assert named.metric("slotcache_requests_waiting") == 1
            lines.close()
            last = [line for line in waiting.iter_lines() if '"slot"' in line]
            assert json.loads(last[-1][6:])["slotcache"]["slot"] == 1


def test_what_a_slot_ran_is_saved_from_it_and_restored_into_another(tiny, tmp_path):
    with running(tiny, parallel=2, slot_save_path=str(tmp_path)) as server:
        first = complete(server, prompt="What is the capital of France? " * 4, id_slot=1)
        file = {"filename": "slot1.bin"}
        saved = server.http.post("/slots/1?action=save", json=file).json()
        assert saved["n_saved"] == first["timings"]["prompt_n"] + 3, "all tokens but the last, which has no KV"
        assert server.http.post("/slots/0?action=save", json={"filename": "slot0.bin"}).json()["n_saved"] == 0
        server.http.delete("/v1/cache")
        assert server.http.post("/slots/0?action=restore", json=file).json()["n_restored"] == saved["n_saved"]
        again = complete(server, prompt="What is the capital of France? " * 4, id_slot=0)
        assert again["content"] == first["content"] and again["timings"]["cache_n"] > 20
        assert server.http.post("/slots/0?action=erase").json()["n_erased"] > 20
        assert complete(server, prompt="What is the capital of France? " * 4, id_slot=0)["timings"]["cache_n"] == 0
