"""Sessions of agents and other programs on many templates: no request is refused, and each finds what the last one left.

SLOTCACHE_TEMPLATES: a folder of *.jinja, such as llama.cpp's models/templates, whose USUAL are taken, too.
"""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.bench.servers import Server
from slotcache.slots.radix import common_prefix
from support.differential import ask, recorded
from support.programs import PROGRAMS
from support.recorder import Record, Recorded
from support.template_shapes import REAL, SMALL

USUAL = [
    "Qwen3.5-4B",
    "openai-gpt-oss-120b",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "google-gemma-2-2b-it",
    "google-gemma-4-31B-it",
    "MiniMax-M2",
    "MiniMax-M3",
]
TEMPLATES = SMALL | {name: source for name, source in REAL.items() if name in USUAL}
BREAKS = {"Qwen3.5-4B", "openai-gpt-oss-120b", "Mistral-Small-3.2-24B-Instruct-2506"}
"""They put tools in front of the last question, or leave out what an answer had beside calls once another one follows."""
TURNS = 30 if REAL else 8
COMPUTED_AGAIN = 8  # tokens at the end of each prompt
CONTEXT = 16384

On = tuple[str, Server, Record]


@pytest.fixture(scope="module", params=TEMPLATES)
def on(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    """A server with a template."""
    folder = tmp_path_factory.mktemp("programs")
    model = generate(folder / "model.gguf", SHAPES["tiny"])
    template = folder / "template.jinja"
    template.write_text(TEMPLATES[request.param], "utf-8")
    flags = ["-m", str(model), "-c", str(CONTEXT), "-np", "2", "--cache-prompt", "--any-model", "--idle-prefill=off"]
    with recorded(folder, "turns", [*flags, "--chat-template-file", str(template)]) as (server, record):
        yield request.param, server, record


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_turn_finds_what_the_last_one_left(on: On, program: str) -> None:
    name, server, record = on
    before: list[int] = []
    last = ""
    for turn in PROGRAMS[program](TURNS):
        ask(server, "POST", turn.path, turn.body)
        one = _taken(record)
        shared = common_prefix(np.array(before, np.int32), np.array(one.prompt, np.int32))
        assert one.cached >= min(shared, len(one.prompt) - COMPUTED_AGAIN), (len(before), shared, one.cached)
        if name not in BREAKS:
            kept = json.loads(ask(server, "POST", "/detokenize", {"tokens": before[:shared]}))["content"]
            assert last in kept, (last, kept)
        before, last = one.prompt, turn.last


def _taken(record: Record) -> Recorded:
    """Return the request that has just been answered."""
    record.read()
    assert record.is_settled
    (one,) = (one for one in record.requests.values() if one.answer)
    record.requests.clear()
    record.laid_out.clear()
    return one
