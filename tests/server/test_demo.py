"""The embedded model behind a real port: it answers from documents, and says so with reuse and without alike."""

from slotcache.bench.demo import SCRIPT, converse
from slotcache.models.demo import FILE
from slotcache.server.config.settings import Settings
from slotcache.server.serve import model_path

from server.conftest import running

MOST_BYTES = 12 << 20
LEARNT = {
    "[d12] Velmora\nThe river is Oskel.\n\nWhen does it begin?": [
        *(344, 49, 50, 93, 440, 354, 109, 442, 10, 261, 890, 260, 374, 647, 354, 285, 1891, 675, 404, 893, 265, 63),
    ],
    "See [a-b.md] above.\n\n": [563, 555, 97, 913, 477, 93, 509, 285],
    "naïve 1,250 €  x\n": [1174, 195, 175, 336, 32, 49, 44, 50, 53, 48, 1524, 32, 32, 120, 10],
    "<|im_end|>\n<|im_start|>user\n": [2047, 10, 2046, 317, 262, 10],
}
"""Texts, and the ids that the model learnt them as: training had a tokenizer of its own."""


def test_it_is_served_where_no_model_is_named_and_is_small() -> None:
    assert model_path(Settings()) == FILE
    assert FILE.stat().st_size <= MOST_BYTES


def test_its_vocabulary_cuts_text_as_it_was_trained() -> None:
    with running(FILE) as server:
        for text, ids in LEARNT.items():
            assert server.http.post("/tokenize", json={"content": text}).json()["tokens"] == ids


def test_the_demo_answers_and_reuses_and_reuse_changes_no_answer() -> None:
    with running(FILE) as server:
        steps = list(converse(server.url))
    assert len(steps) == len(SCRIPT)
    assert [step.reused.text for step in steps] == [step.computed.text for step in steps]
    assert all(step.computed.cached_tokens == 0 for step in steps)
    assert all(step.reused.cached_tokens > step.reused.prompt_tokens // 2 for step in steps[1:])
    assert sum(step.reused.text == step.question.answer for step in steps) >= 4
