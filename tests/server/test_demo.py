"""The embedded model behind a real port: it answers from documents, and says so with reuse and without alike."""

import json
from pathlib import Path

import pytest
from slotcache.bench.cli import main as bench
from slotcache.bench.demo import SCRIPT, converse
from slotcache.models.demo import FILE
from slotcache.models.model import Model
from slotcache.models.training.encoder import Encoder
from slotcache.server.serve import model_path
from slotcache.server.settings import Settings

from server.conftest import running

MOST_BYTES = 12 << 20


def test_it_is_served_where_no_model_is_named_and_is_small() -> None:
    assert model_path(Settings()) == FILE
    assert FILE.stat().st_size <= MOST_BYTES


def test_its_vocabulary_cuts_text_as_training_did() -> None:
    model, encoder = Model(FILE), Encoder.load()
    for text in (
        "[d12] Velmora\nThe river is Oskel.\n\nWhen does it begin?",
        "See [a-b.md] above.\n\n",
        "naïve 1,250 €  x\n",
    ):
        assert list(model.tokenize(text, special=False)) == encoder.encode(text)
    turn = "<|im_end|>\n<|im_start|>user\n"
    assert list(model.tokenize(turn, special=True)) == encoder.encode_template(turn)


def test_the_demo_answers_and_reuses_and_reuse_changes_no_answer() -> None:
    with running(FILE) as server:
        steps = list(converse(server.url))
    assert len(steps) == len(SCRIPT)
    assert [step.reused.text for step in steps] == [step.computed.text for step in steps]
    assert all(step.computed.cached_tokens == 0 for step in steps)
    assert all(step.reused.cached_tokens > step.reused.prompt_tokens // 2 for step in steps[1:])
    assert sum(step.reused.text == step.question.answer for step in steps) >= 4


def test_the_quality_bench_measures_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality.json"
    with running(FILE) as server:
        assert bench(["quality", "--url", server.url, "--count", "1", "--questions", "2", "--json", str(out)]) == 0
    ways, kinds, freer = json.loads(out.read_text())["tables"]
    assert freer["rows"][0][0] == 2 and 0 <= freer["rows"][0][1] <= 1
    assert ways["rows"][0][0] == "retrieval order" and len(ways["rows"]) == 10
    reused = {row[0]: row[3] for row in ways["rows"]}
    assert reused["read while they are searched"] > reused["exact order, order hint"]
    assert all(0 <= row[1] <= row[2] <= 1 for row in ways["rows"])
    assert reused["cache off"] == 0, "nothing is reused with the cache off"
    assert {row[0] for row in kinds["rows"]} >= {"1 document", "5 documents", "unknown"}


def test_the_quality_bench_measures_one_way_alone(tmp_path: Path) -> None:
    out = tmp_path / "quality.json"
    with running(FILE) as server:
        fast = ["quality", "--url", server.url, "--count", "1", "--questions", "2", "--one-way", "--json", str(out)]
        assert bench(fast) == 0
    ways, kinds, freer = json.loads(out.read_text())["tables"]
    assert [row[0] for row in ways["rows"]] == ["exact order, order hint"]
    assert len(kinds["rows"]) == 12 and freer["rows"][0][0] == 2
