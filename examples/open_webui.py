"""A chat of Open WebUI over a folder, with and without `documents_in_text`: python examples/open_webui.py [URL]

Like Open WebUI, it numbers the sources of each question by rank, and puts them into the system message or before the last
question. Open WebUI itself needs only the address, and RAG_SYSTEM_CONTEXT=true to use the system message:

    slotcache serve --cache-prompt --documents-in-text auto
    OPENAI_API_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none RAG_SYSTEM_CONTEXT=true open-webui serve
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
NOTES = {path.name: path.read_text() for path in sorted((Path(__file__).parent / "notes").glob("*.md"))}
NUM_SOURCES = 4
QUESTIONS = (
    "When is the boiler serviced next?",
    "What pressure should it have?",
    "Who serviced it last?",
    "When are the winter tyres changed?",
    "Where is the key of the hall?",
    "What is in the hall cupboard?",
    "When is the water turned off in the allotment?",
    "Which month is the rent to be paid?",
)
INSTRUCTIONS = "You are a helpful assistant."
TASK = """### Task:
Answer the question with the help of the context. Cite it in the format [id] if a <source> has an id, as <source id="1"> has.

<context>
{}
</context>"""


def words(text: str) -> set[str]:
    return set(re.findall(r"\w{3,}", text.lower()))


def context(question: str) -> str:
    """Return the sources of a question as Open WebUI writes them: those with most of its words first."""
    ranked = sorted(NOTES, key=lambda name: (-len(words(question) & words(NOTES[name])), name))[:NUM_SOURCES]
    numbered = enumerate(ranked, 1)
    return TASK.format("\n".join(f'<source id="{at}" name="{name}">{NOTES[name]}</source>' for at, name in numbered))


def messages_of(history: Sequence[dict[str, str]], question: str, in_system: bool) -> list[dict[str, str]]:
    """Return the messages of a turn. The sources of earlier turns are gone."""
    system, user = INSTRUCTIONS, question
    if in_system:
        system = f"{INSTRUCTIONS}\n{context(question)}"
    else:
        user = f"{context(question)}\n{question}"
    return [{"role": "system", "content": system}, *history, {"role": "user", "content": user}]


def chat(client: Any, in_system: bool, option: str) -> tuple[int, list[str], list[Any]]:
    """Return the prompt tokens that a chat took to compute, its answers, and what was recognised in each turn."""
    history: list[dict[str, str]] = []
    computed, answers, reports = 0, list[str](), list[Any]()
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model="any",
            messages=messages_of(history, question, in_system),
            max_tokens=40,
            temperature=0,
            extra_body={"cache_prompt": True, "cache_scope": f"{in_system} {option}", "documents_in_text": option},
        )
        computed += answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens
        answers.append(answer.choices[0].message.content)
        reports.append(answer.slotcache.get("documents_in_text"))
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answers[-1]}]
    return computed, answers, reports


if __name__ == "__main__":
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    for in_system, where in ((True, "in the system message"), (False, "in the last message")):
        without, computed = (chat(client, in_system, option) for option in ("off", "auto"))
        share = computed[0] / without[0]
        print(f"context {where}: {computed[0]:,} prompt tokens computed, {without[0]:,} without: {share:.2f}")
        print(f"  recognised in the last turn: {computed[2][-1]}")
