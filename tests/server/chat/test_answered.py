"""Answers in later prompts: sampled ids where the text is the same, and only there."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from slotcache.models.marks import TextPiece
from slotcache.server.chat.tokens import Sampled, answer_key, place_answers

IDS = np.array([7, 8, 9], np.int32)
TURN = "<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PIECES = [
    TextPiece("<|im_start|>user\n", None),
    TextPiece("Hi", 0),
    TextPiece(f"{TURN}{CALL}<|im_end|>\n<tool>", None),
    TextPiece("5", 2),
]


def never(text):
    return False


def place(answer, pieces=PIECES, touches=never):
    return place_answers(pieces, {1: Sampled(answer, IDS)}, touches)


def test_ids_stand_where_the_template_writes_the_same_text():
    shown = place(CALL)
    assert "".join(each.piece.text for each in shown) == "".join(piece.text for piece in PIECES)
    (answer,) = (each for each in shown if each.tokens is not None)
    assert answer.piece == TextPiece(CALL, 1) and answer.tokens is IDS
    assert shown[2].piece.text == TURN and not any(each.rewritten for each in shown)


def test_a_changed_answer_is_named():
    shown = place("<think>Hm.</think>" + CALL)
    assert [each.piece for each in shown] == PIECES
    assert [each.rewritten for each in shown] == [None, None, 1, None]


def test_an_answer_spans_the_pieces_of_its_message():
    pieces = [TextPiece("user: Hi\nbot: <think>", None), TextPiece("Hm.", 1, part="reasoning"), TextPiece("</think>", None)]
    pieces += [TextPiece("Yes.", 1), TextPiece("\n", None)]
    shown = place("<think>Hm.</think>Yes.", pieces)
    assert [each.piece.text for each in shown] == ["user: Hi\nbot: ", "<think>Hm.</think>Yes.", "\n"]


def test_a_client_never_gets_a_control_token_by_an_answer():
    pieces = [TextPiece("bot: [THINK]", None), TextPiece("Hm.[/THINK]Yes", 1, part="reasoning"), TextPiece("[/THINK]", None)]
    shown = place("[THINK]Hm.[/THINK]Yes", pieces, lambda text: "[/THINK]" in text)
    assert [each.piece for each in shown] == pieces
    plain = [TextPiece("bot: ", None), TextPiece("[THINK]", None, is_plain=True), TextPiece("Yes", 1)]
    assert [each.piece for each in place("[THINK]Yes", plain, lambda text: "[THINK]" in text)] == plain


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.sampled_from([None, 0, 1, 2, 3])), max_size=8), st.data())
def test_the_text_stays_the_same(drawn, data):
    owned = iter(sorted(owner for _, owner in drawn if owner is not None))
    pieces = [TextPiece(text, None if owner is None else next(owned)) for text, owner in drawn if text]
    answers = data.draw(st.dictionaries(st.integers(0, 3), st.text("ab", min_size=1, max_size=3), max_size=4))
    shown = place_answers(pieces, {at: Sampled(text, IDS) for at, text in answers.items()}, never)
    assert "".join(each.piece.text for each in shown) == "".join(piece.text for piece in pieces)
    for each in shown:
        assert each.tokens is None or answers[each.piece.message or 0] == each.piece.text


def test_an_answer_is_found_as_it_comes_back():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."}
    back = {"role": "assistant", "content": "", "tool_calls": [{**call, "id": "2"}]}
    assert answer_key(given) == answer_key(back) != answer_key({"role": "assistant", "content": ""})
