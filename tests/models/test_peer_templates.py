"""All templates of a folder, rendered here and by llama-server: they give the same prompt.

SLOTCACHE_LLAMA_SERVER: the program. SLOTCACHE_TEMPLATES: a folder of *.jinja, such as llama.cpp's models/templates. This
takes a minute.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from slotcache.models.jinja import TemplateError
from slotcache.models.model import Model
from slotcache.models.template import ChatTemplate
from support.peer import llama_server, prompt_of

PROGRAM, FOLDER = os.environ.get("SLOTCACHE_LLAMA_SERVER", ""), os.environ.get("SLOTCACHE_TEMPLATES", "")
FILES = sorted(Path(FOLDER).glob("*.jinja")) if PROGRAM and FOLDER else []

QUESTION = {"role": "user", "content": "Is it warm in Paris?"}
PARAMETERS = {"city": {"type": "string", "description": "A city."}, "day": {"type": "string"}}
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "parameters": {"type": "object", "properties": PARAMETERS, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "warm"}
THANKS = [{"role": "assistant", "content": "It is."}, {"role": "user", "content": "Thanks"}]


def calling(content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [CALL]}


def turns(*said: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in said]


CHATS: dict[str, dict[str, Any]] = {
    "turns": {"messages": turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"))},
    "tools": {"messages": [QUESTION], "tools": TOOLS},
    "called": {"messages": [QUESTION, calling(None), RESULT], "tools": TOOLS},
    "called with text": {"messages": [QUESTION, calling("Let me see."), RESULT, *THANKS], "tools": TOOLS},
    "user": {"messages": [QUESTION]},
    "reasoning": {
        "messages": [QUESTION, {"role": "assistant", "content": "No.", "reasoning_content": "Winter."}, THANKS[1]]
    },
    "developer": {"messages": turns(("developer", "Be brief."), ("user", "Hi"))},
    "no thinking": {"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": [QUESTION], "chat_template_kwargs": {"reasoning_effort": "low"}},
}

# docs/prompts.md says why.
DIFFERENT = {
    ("fireworks-ai-llama-3-firefunction-v2", "tools"),
    ("fireworks-ai-llama-3-firefunction-v2", "called"),
    ("fireworks-ai-llama-3-firefunction-v2", "called with text"),
    ("google-gemma-2-2b-it", "called"),
    ("google-gemma-2-2b-it", "called with text"),
    ("google-gemma-4-31B-it-interleaved", "called with text"),
    ("llama-cpp-rwkv-world", "called"),
    ("llama-cpp-rwkv-world", "called with text"),
    ("microsoft-Phi-3.5-mini-instruct", "called"),
    ("microsoft-Phi-3.5-mini-instruct", "called with text"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "developer"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "turns"),
    ("unsloth-mistral-Devstral-Small-2507", "reasoning"),
}


def ours(template: ChatTemplate, chat: dict[str, Any]) -> str | None:
    try:
        pieces = template.pieces(chat["messages"], chat.get("chat_template_kwargs"), tools=chat.get("tools"))
    except TemplateError:
        return None
    return "".join(piece.text for piece in pieces)


@pytest.mark.skipif(not FILES, reason="needs SLOTCACHE_LLAMA_SERVER and SLOTCACHE_TEMPLATES")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_prompts_are_those_of_llama_server(file: Path, tiny: Path) -> None:
    model = Model(tiny, 0)
    try:
        template = ChatTemplate(file.read_text("utf-8"), model.bos, model.eos)
    finally:
        model.close()
    with llama_server(PROGRAM, tiny, "--chat-template-file", str(file)) as peer:
        for name, chat in CHATS.items():
            expected, prompt = prompt_of(peer, chat), ours(template, chat)
            assert (prompt == expected) != ((file.stem, name) in DIFFERENT), f"{name}\n{expected}\n{prompt}"
