"""How each client opts in to the cache, as docs/clients.md says: the second of two equal prompts is read from it."""

from typing import Any

import pytest
from server.conftest import REST

pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients about themselves
WISH = {"cache_prompt": True}


def openai(url, text):
    package: Any = pytest.importorskip("openai")
    chat = package.OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions
    chat.create(model="any", messages=[{"role": "user", "content": text}], max_tokens=1, extra_body=WISH)


def openai_by_key(url, text):
    package: Any = pytest.importorskip("openai")
    responses = package.OpenAI(base_url=f"{url}/v1", api_key="none").responses
    responses.create(model="any", input=text, max_output_tokens=1, prompt_cache_key="session")


def anthropic(url, text):
    package: Any = pytest.importorskip("anthropic")
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    messages = package.Anthropic(base_url=url, api_key="none").messages
    messages.create(model="any", max_tokens=1, messages=[{"role": "user", "content": [block]}])


def langchain(url, text):
    package: Any = pytest.importorskip("langchain_openai")
    package.ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="any", max_tokens=1, extra_body=WISH).invoke(text)


def llama_index(url, text):
    like: Any = pytest.importorskip("llama_index.llms.openai_like")
    fields = {"model": "any", "api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True, "max_tokens": 1}
    like.OpenAILike(**fields, additional_kwargs={"extra_body": WISH}).chat([like_message(text)])


def like_message(text):
    types: Any = pytest.importorskip("llama_index.core.llms")
    return types.ChatMessage(role="user", content=text)


def litellm(url, text):
    package: Any = pytest.importorskip("litellm")
    fields = {"model": "openai/any", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 1}
    package.completion(**fields, messages=[{"role": "user", "content": text}], extra_body=WISH)


@pytest.mark.parametrize("client", [openai, openai_by_key, anthropic, langchain, llama_index, litellm])
def test_the_second_of_two_equal_prompts_is_read_from_the_cache(served, client):
    text = f"{client.__name__}: " + "a few words that come again " * 20
    client(served.url, text)
    computed = served.metric("slotcache_prompt_tokens_total")
    client(served.url, text)
    assert computed > 100 and served.metric("slotcache_prompt_tokens_total") - computed <= REST
