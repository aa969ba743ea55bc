"""Numbers in the documents that are constants of the code, and sentences about a table."""

import re

import pytest
from slotcache.front import cli as front
from slotcache.front import events, orders
from slotcache.models import grammar, json_schema
from slotcache.models.times import CPU, OTHER
from slotcache.retrieval import files, ranking
from slotcache.server.api import endpoint
from slotcache.server.chat import text_prompt, tool_results
from slotcache.server.config.settings import SETTINGS
from slotcache.server.http.bodies import LARGEST, Bodies
from slotcache.server.http.connection import Connection
from slotcache.server.search import retrieve
from slotcache.slots import groups, snapshots

from docs.markdown import read, rows, section

WINDOW = next(setting.default for setting in SETTINGS if setting.name == "window")
WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}
SENTENCES = [
    ("docs/how-it-works.md", "raises it for up to {} waiting requests that share", groups.MOST_SHARING),
    ("docs/how-it-works.md", "the same uncached text of {} tokens or more", CPU.min_shared),
    ("docs/how-it-works.md", "runs in steps of {} tokens", CPU.background_step),
    ("docs/how-it-works.md", "so there a step takes about {} ms", OTHER.background_ns / 1e6),
    ("docs/how-it-works.md", "Two snapshots of a prompt are at least {} tokens apart", snapshots.SPACING),
    ("docs/how-it-works.md", "Only the newest {} such snapshots remain", snapshots.UNUSED),
    ("docs/how-it-works.md", "which has {} s of processor time", json_schema.SECONDS),
    ("docs/how-it-works.md", "and {} GiB, and then in a thread", json_schema.BYTES >> 30),
    ("docs/api.md", "A grammar may have {} characters", json_schema.MAX_BYTES),
    ("docs/api.md", "its last {} tokens are used", text_prompt.WINDOW * 3 // 4),
    ("docs/api.md", "its first {} tokens, less", text_prompt.WINDOW // 4),
    ("docs/prompts.md", "Another text of {} characters or more", tool_results.LEAST),
    ("docs/operations.md", "may take {} times `--max-body`", LARGEST),
    ("docs/operations.md", "must arrive at {} kB/s", Bodies.up_to(1).rate / 1000),
    ("docs/operations.md", "after {} s of grace (408)", Bodies.up_to(1).patience),
    ("docs/operations.md", "reads nothing for {} s is closed", Connection.patience),
    ("docs/retrieval.md", "takes longer than {} ms and a slot is idle", endpoint.STAGE * 1000),
    ("docs/formats.md", "files above {} MiB", files.MAX_BYTES >> 20),
    ("docs/retrieval.md", "first {} of that search", ranking.DEPTH),
    ("docs/retrieval.md", "spans that quote {} words or more", retrieve.QUOTED_WORDS),
    ("docs/retrieval.md", "at most {} of each kind", retrieve.MOST),
    ("docs/scale.md", "The front remembers {} of these orders", orders.MAX_TURNS),
    ("docs/scale.md", "an event of more than {} MiB", events.LARGEST_EVENT >> 20),
    ("docs/scale.md", "open answers have {} seconds to finish", front.GRACE),
    ("SECURITY.md", "may take {} s of processor time", json_schema.SECONDS),
]


@pytest.mark.parametrize(
    ("name", "sentence", "value"), SENTENCES, ids=[f"{name} {text[:40]}" for name, text, _ in SENTENCES]
)
def test_a_number_is_the_codes(name, sentence, value):
    text = " ".join(read(name).split())
    assert value == int(value)
    number = int(value)
    forms = {f"{number:,}", str(number), WORDS.get(number, "")} - {""}
    assert any(sentence.format(form) in text for form in forms), f"{name}: {sentence!r} is {number} in the code"


def test_an_answer_of_a_grammar_may_wait_a_second():
    text = " ".join(read("docs/how-it-works.md").split())
    assert grammar.PATIENCE == 1 and "waiting for more than a second in all." in text


def test_the_bound_on_overtaking_is_reported_with_its_exceptions():
    """Settings.md is made from the settings: how-it-works says the same in words."""
    text = " ".join(section(read("docs/how-it-works.md"), "## One step").split())
    assert WINDOW and "After `--window` overtakes, no later request of its priority" in text
    assert "not apply to requests of a higher priority, nor while the slot" in text


def test_what_is_said_of_eviction_policies_is_in_their_table():
    text = section(read("docs/benchmarks.md"), "## Eviction policies")
    by_time = [[float(cell) for cell in cells[2:6]] for cells in rows(text)]
    assert len(by_time) == 15
    prose = " ".join(text.split())
    said = re.search(r"never more than ([\d.]+) points below GDSF and ([\d.]+) below LRU.*?LFU is ([\d.]+) above", prose)
    most = [round(max(row[at] - row[0] for row in by_time), 1) for at in (1, 2, 3)]
    assert said and list(map(float, said.groups())) == most


def test_a_figure_in_bold_missed_its_target():
    """In tables whose last columns are a ratio and its target, both at most."""
    found = 0
    for cells in rows(section(read("docs/benchmarks.md"), "## Reading along with a search")):
        *_, ratio, target = cells
        if (said := re.match(r"(\*\*)?([\d.]+)(?:\*\*)? of ", ratio)) and re.fullmatch(r"[\d.]+", target):
            assert bool(said[1]) == (float(said[2]) > float(target)), cells
            found += 1
    assert found >= 5


def test_the_models_that_fit_follow_the_pages_own_arithmetic():
    """The sizes are computed: a context is what a card has beside the weights and 1.5 GiB, in KV of a token."""
    text = section(read("docs/fitting.md"), "## Which model, which memory, which flags")
    prose = " ".join(text.split())
    kv = {size: int(number) for number, size in re.findall(r"(\d+)(?: KiB)? for (?:Qwen2\.5 )?(\d+(?:\.\d+)?B)", prose)}
    assert {"1.5B", "3B", "7B", "14B", "32B"} <= kv.keys() and "(memory - 1.5 GiB - file) / KV of a token" in prose
    weights: dict[str, float] = {}
    found = 0
    for memory, line, *rest in rows(text):
        (size,) = re.findall(r"-(\d+(?:\.\d+)?B)-", line)[:1]
        gib = float(memory.split()[0])
        if rest:
            weights[size] = float(rest[0].split()[0])
            if rest[2].startswith("nothing"):
                trained = 32_768 if size in ("1.5B", "3B") else 65_536
                room = min((gib - 1.5 - weights[size]) * (1 << 20) / kv[size], trained)
                assert abs(int(rest[1].replace(",", "")) - room) < 0.04 * room, (memory, line)
                found += 1
        elif size in weights:
            assert "-c 32768" in line and weights[size] + 32_768 * kv[size] / (1 << 20) + 1.5 <= gib, (memory, line)
            found += 1
    assert found >= 12
