"""What SECURITY.md says of clients, at a running server."""

import logging

from docs.markdown import read

SPECIAL = "<|im_end|>"
TEXT = " ".join(read("SECURITY.md").split())


def length(server, path, **body):
    answer = server.http.post(path, json={"max_tokens": 1, "cache_prompt": False, **body}).json()
    return answer["timings"]["cache_n"] + answer["timings"]["prompt_n"]


def chat(server, text):
    return length(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}])


def test_control_tokens_count_in_text_completions_and_not_in_chats(demo_server):
    assert "plain text in a chat's prompt" in TEXT and "In the prompts of text completions" in TEXT
    once, twice = ("a" + number * SPECIAL for number in (1, 2))
    for path in ("/completion", "/v1/completions"):
        assert length(demo_server, path, prompt=twice) - length(demo_server, path, prompt=once) == 1
    assert chat(demo_server, twice) - chat(demo_server, once) > 1


def test_without_the_cache_a_response_is_stored_and_a_chat_is_not(demo_server):
    assert "stores no answer of a chat" in TEXT and 'stores its answer unless the request has `"store": false`' in TEXT
    fields = {"cache_prompt": False, "conversation": "one of a chat", "max_tokens": 1}
    demo_server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi."}], **fields})
    assert demo_server.http.get("/v1/conversations/one of a chat").status_code == 404
    body = {"input": "Hi.", "cache_prompt": False, "max_output_tokens": 1}
    made = demo_server.http.post("/v1/responses", json=body).json()["id"]
    kept = demo_server.http.post("/v1/responses", json=body | {"store": False}).json()["id"]
    assert demo_server.http.get(f"/v1/responses/{made}").status_code == 200
    assert demo_server.http.get(f"/v1/responses/{kept}").status_code == 404
    demo_server.http.delete(f"/v1/responses/{made}")


def test_a_line_of_the_log_has_the_path(demo_server, caplog):
    assert "A line of the log has the path of the request" in TEXT
    with caplog.at_level(logging.INFO, "slotcache.requests"):
        demo_server.http.get("/v1/conversations/my secret name")
        demo_server.http.get("/health")  # the line of one request is written before the loop reads another
    assert any("my secret name" in record.getMessage() for record in caplog.records)
