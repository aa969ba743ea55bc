"""Batches, kernels and pools of any size: the server starts, and its answers are the same."""

import pytest

from server.conftest import running

QUESTION = "What is in it? " * 8


@pytest.fixture(scope="module")
def expected(tiny):
    with running(tiny) as server:
        return server.chat(QUESTION, max_tokens=20)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("flash_attn", ["off", "on"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch_size": 1},
        {"batch_size": 2, "parallel": 1},
        {"ubatch_size": 2},
        {"batch_size": 255},
        {"ubatch_size": 1},
        {"batch_size": 8, "ubatch_size": 4},
        {"ctx_size": 1},
        {"ctx_size": 255, "batch_size": 64},
        {"ctx_size": 300, "batch_size": 1024, "ubatch_size": 1024},
    ],
    ids=str,
)
def test_small_batches_kernels_and_pools(tiny, expected, sizes, flash_attn):
    with running(tiny, flash_attn=flash_attn, **sizes) as server:
        first, again = (server.chat(QUESTION, max_tokens=20) for _ in range(2))
        contents = [answer["choices"][0]["message"]["content"] for answer in (first, again)]
        assert contents[0] == contents[1] and (flash_attn == "on" or contents[0] == expected)
        assert again["timings"]["cache_n"] > 50
        assert server.metric("slotcache_host_budget_bytes") > 0, "the warm-up failed"


def test_a_request_may_take_the_whole_pool_or_a_share_of_it(tiny):
    for unified, share in ((True, 1024), (False, 256)):
        with running(tiny, ctx_size=1024, parallel=4, kv_unified=unified) as server:
            assert server.http.get("/props").json()["default_generation_settings"]["n_ctx"] == share
            error = server.http.post("/completion", json={"prompt": [100] * share}).json()["error"]
            assert error["n_ctx"] == share and error["type"] == "exceed_context_size_error"
            assert (
                server.http.post("/completion", json={"prompt": [100] * (share - 4)}).json()["timings"]["predicted_n"] == 4
            )
