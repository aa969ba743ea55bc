"""Grammars on a real vocabulary: what they allow, what is refused, and what hostile ones cost.

SLOTCACHE_HOSTILE=1 tries all hostile grammars, which takes half a minute.
"""

import json
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from slotcache.models import grammar, sampling
from slotcache.models.grammar import BYTES_A_CHARACTER, KEPT, Constraint, Grammars, compute_masks
from slotcache.models.json_schema import MAX_BYTES, GrammarError, GrammarSource
from slotcache.models.model import Model
from slotcache.models.sampling import ALONG, Sampler
from slotcache.models.sampling_params import Sampling

SECONDS = 30.0  # of processor time that any grammar may take in this process
CHAIN = 9000
FREE = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}


@pytest.fixture(scope="module")
def model(tiny):
    model = Model(tiny, vocab_only=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def grammars(model):
    grammars = Grammars(model)
    yield grammars
    grammars.close()


def schema(value):
    return GrammarSource("json_schema", value if isinstance(value, str) else json.dumps(value))


def compiled(grammars, source):
    return grammars.compile(source).result()


def walk(model, grammar, seed=0, limit=400, fast_forward=True):
    """Generate with random logits. Return the text, and the numbers of tokens and of those that were chosen."""
    constraint, random = grammar.start(fast_forward=fast_forward), np.random.default_rng(seed)
    tokens, chosen = constraint.take_forced(), 0
    while len(tokens) < limit and not (tokens and model.is_end(tokens[-1])):
        logits = random.standard_normal(model.num_vocab).astype(np.float32)
        assert constraint.apply(logits) and not constraint.error
        tokens.append(int(logits.argmax()))
        constraint.accept(tokens[-1])
        tokens += constraint.take_forced()
        chosen += 1
    return model.detokenize(np.array(tokens, np.int32)), len(tokens), chosen


def accepts(model, grammar, text, special=False):
    """Return whether an answer may be exactly this text, token by token."""
    constraint = grammar.start(fast_forward=False)
    for token in [*model.tokenize(text, special=special).tolist(), min(model.ends)]:
        logits = np.zeros(model.num_vocab, np.float32)
        constraint.apply(logits)
        if logits[token] < 0:
            return False
        constraint.accept(token)
    return True


def test_masks_allow_what_fits_and_nothing_else(model, grammars):
    logits = np.zeros(model.num_vocab, np.float32)
    compiled(grammars, GrammarSource("regex", "[ax]b*c")).start().apply(logits)
    allowed = {model.piece(token) for token in np.flatnonzero(logits == 0).tolist()}
    pieces = {model.piece(token) for token in range(model.num_vocab)}
    allowed_starts = {piece for piece in pieces if re.fullmatch(b"[ax](b*|b*c)", piece)}
    assert allowed == allowed_starts and len(allowed_starts) > 2


def test_control_tokens_are_no_text_and_all_ends_end(model, grammars):
    logits = np.zeros(model.num_vocab, np.float32)
    compiled(grammars, GrammarSource("regex", "(?s:.*)")).start().apply(logits)
    allowed = set(np.flatnonzero(logits == 0).tolist())
    controls = {model.tokenize(text, special=True)[0] for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert model.ends <= allowed and not (controls - model.ends) & allowed
    assert accepts(model, compiled(grammars, GrammarSource("regex", "<.im_start.>x")), "<|im_start|>x")


TREE = {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/tree"}}]}}}
LANGUAGES = [
    (schema({"type": "integer", "minimum": 3, "maximum": 12}), ["3", "10", "12"], ["2", "13", "3.0", " 3"]),
    (schema({"enum": ["a", 1, None, {"b": [1, 2]}]}), ['"a"', "1", "null", '{"b": [1, 2]}'], ["a", '{"b":[1,2]}']),
    (schema({"properties": {"a": True}, "additionalProperties": False}), ["{}", '{"a": 5}'], ['{"b": 1}', "5"]),
    (schema({"items": {"type": "null"}, "minItems": 2}), ["[null, null]"], ["[null]", "[]", "null"]),
    (schema({"x-guidance": FREE, "items": {"const": 1}}), ["[ 1,\n1]", "[1,1]"], ["[1 1]"]),
    (schema({"x-guidance": {"item_separator": "[ \\n]*, ?"}, "items": {"const": 1}}), ["[1,1]", "[1\n, 1]"], ["[1,  1]"]),
    (schema(TREE), ["null", "[[null], []]"], ["[1]"]),
    (
        GrammarSource("gbnf", 'root ::= "x" | (two ","){2,3}\ntwo ::= [^,\\n]+ # a remark'),
        ["x", "a,b,", "a,b,c,"],
        ["a,", "a,b"],
    ),
    (
        GrammarSource("gbnf", r'root ::= [\u00e0-\u00ff] "\u00e9" "\x41" "\U0001F600"'),
        ["äéA😀", "ÿéA😀"],
        ["aéA😀", "äeA😀"],
    ),
    (
        GrammarSource("gbnf", 'root ::= e\ne ::= e "+" n | n\nn ::= [0-9]+ | "(" e ")"'),
        ["1", "1+(2+3)+45"],
        ["1+", "(1", "+1"],
    ),
    (GrammarSource("lark", 'start: WORD ("," WORD)*\nWORD: /[a-z]+/'), ["a", "ab,c"], ["a,", ",a"]),
    (GrammarSource("lark", 'start: "<|im_end|>" /<x>/ // <remark>'), ["<|im_end|><x>"], ["<x>"]),
]


ONLY_NAMED = {
    "properties": {"a": {"const": 1}, "b": {"const": 2}},
    "patternProperties": {"^[ab]$": {"type": "integer"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("where", ["", "/properties/o", "/items"])
def test_a_pattern_of_names_that_are_all_properties_leads_no_answer_astray(model, grammars, where):
    """An answer would end behind the comma, with an error."""
    _, keyword, *name = f"{where}//".split("/")[:3]
    whole = {keyword: {name[0]: ONLY_NAMED} if name[0] else ONLY_NAMED} if keyword else ONLY_NAMED
    grammar = compiled(grammars, schema(whole))
    assert grammar.left_out == (f"patternProperties '^[ab]$' at #{where}",)
    for seed in range(8):
        text, *_ = walk(model, grammar, seed)
        assert where or json.loads(text).keys() <= {"a", "b"}
    more = compiled(grammars, schema(ONLY_NAMED | {"patternProperties": {"^[abc]$": {"type": "integer"}}}))
    assert more.left_out == () and accepts(model, more, '{"a": 1, "c": 5}') and not accepts(model, more, '{"d": 5}')


NAMED = {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a"]}
NOTHING_MORE, MORE = ['{"a": 1}', '{"a": 1, "b": 2}'], ['{"a": 1, "c": 3}']


@pytest.mark.parametrize(
    ("closed", "open_"),
    [
        (NAMED, NAMED | {"additionalProperties": True}),
        ({"$ref": "#/$defs/n", "$defs": {"n": NAMED}}, NAMED | {"required": ["a", "c"]}),
        ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": NAMED}}, NAMED | {"patternProperties": {"^c$": {"const": 3}}}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"allOf": [NAMED, {"properties": {"c": {"const": 3}}, "required": ["c"]}]}),
        (NAMED, {"$ref": "#/$defs/n", "properties": {"c": {"const": 3}}, "$defs": {"n": NAMED}}),
    ],
)
def test_an_object_ends_after_its_named_properties_unless_more_may_or_must_follow(model, grammars, closed, open_):
    grammar = compiled(grammars, schema(closed))
    assert [accepts(model, grammar, text) for text in [*NOTHING_MORE, *MORE]] == [True, True, False]
    answers = ['{"a": 1, "c": 3}', '{"a": 1, "b": 2, "c": 3}']
    assert any(accepts(model, compiled(grammars, schema(open_)), text) for text in answers)


@pytest.mark.parametrize("text", ["start: ~/a/", "start: ~/[b-z]+/", "start: A\nA: ~/x(.|\\n)*/"])
def test_a_complement_allows_no_control_token(model, grammars, text):
    logits = np.zeros(model.num_vocab, np.float32)
    constraint = compiled(grammars, GrammarSource("lark", text)).start()
    assert constraint.apply(logits)
    allowed = set(np.flatnonzero(logits > -np.inf).tolist())
    assert allowed and model.tokenize("<|im_start|>", special=True)[0] not in allowed


@pytest.mark.parametrize(("source", "fits", "others"), LANGUAGES)
def test_languages(model, grammars, source, fits, others):
    grammar = compiled(grammars, source)
    assert [text for text in fits if not accepts(model, grammar, text)] == []
    assert [text for text in others if accepts(model, grammar, text)] == []


def test_a_format_of_calls_with_control_tokens_and_with_tags_that_are_text(model, grammars):
    arguments = (("add", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),)
    call = '"{\\"name\\": \\"add\\", \\"arguments\\": " @add "}"'
    (token,) = model.tokenize("<|im_start|>", special=True)
    begin, end = f"<[{token}]>", '"</call>"'
    made = '{"name": "add", "arguments": {"n": 12}}'
    marked = GrammarSource(
        "lark", f"start: TEXT? (call TEXT?)+\nTEXT: /(.|\\n)+/\ncall: {begin} {call} {end}", arguments, True
    )
    lazy = f'start: (before {call} {end})+\nbefore[lazy]: /(.|\\n)*/ "<call>"'
    for source, tag in ((marked, "<|im_start|>"), (GrammarSource("lark", lazy, arguments, True), "<call>")):
        grammar = compiled(grammars, source)
        assert accepts(model, grammar, f"I add: {tag}{made}</call>", special=True)
        assert accepts(model, grammar, f"{tag}{made}</call>{tag}{made}</call>", special=True)
        assert not accepts(model, grammar, "I do not.", special=True)
        assert not accepts(model, grammar, f"{tag}{made.replace('12', 'x')}</call>", special=True)


def test_text_without_a_choice_is_not_sampled_and_changes_no_answer(model, grammars):
    fields = {"first name": {"enum": ["Ada", "Bob"]}, "a much longer name of a field": {"const": "and its long value"}}
    source = schema({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})
    grammar = compiled(grammars, source)
    for seed in range(5):
        text, tokens, chosen = walk(model, grammar, seed)
        assert json.loads(text)["a much longer name of a field"] == "and its long value"
        assert chosen <= 4 < 20 < tokens
        plain, _, each = walk(model, grammar, seed, fast_forward=False)
        assert set(json.loads(plain)) == set(fields) and each > 20


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (schema({"$ref": "#"}), "circle"),
        (schema({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "circle"),
        (schema({"items": {"$ref": "#"}, "minItems": 1}), "circle"),
        (schema({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}), "circle"),
        (schema({"strict": True, "properties": {"a": {"requried": []}}}), "#/properties/a: 'requried' is not supported"),
        (schema({"strict": True, "items": {"uniqueItems": True}}), "#/items: 'uniqueItems' is not supported"),
        (schema({"strict": True, "x-guidance": {"lenient": True}, "not": {"minimum": 3}}), "'not' is not supported"),
        (schema({"strict": True, "pattern": "^(?!a)"}), "looks around"),
        (schema({"x-guidance": {"item_separator": "|"}}), "x-guidance.item_separator is '|'"),
        (schema({"x-guidance": {"item_separator": ":"}}), "expected a comma"),
        (schema({"x-guidance": {"key_separator": r"\s*:"}}), "expected a colon"),
        (schema({"x-guidance": {"whitespace_pattern": "[ x]*"}}), "expected JSON's white space"),
        (schema({"strict": True, **ONLY_NAMED}), "no name fits"),
        (schema({"type": [{}]}), "type"),
        (schema({"enum": []}), "empty"),
        (schema("[1"), "not JSON"),
        (schema("5"), "a schema is an object"),
        (GrammarSource("regex", "(?=a)b"), "look-around"),
        (GrammarSource("gbnf", 'root ::= "a" <think>'), "Expected"),
        (GrammarSource("gbnf", 'start ::= "a"'), "root"),
        (GrammarSource("lark", "start: <[2]>"), "names a token"),
        (GrammarSource("lark", 'start: a "</"\na[stop="x"]: /b*/'), "not supported"),
        (GrammarSource("lark", 'start: %json {"type": "null"}'), "not supported"),
        (GrammarSource("regex", "x" * (MAX_BYTES + 1)), "expected at most"),
    ],
)  # fmt: skip
def test_what_is_refused(grammars, source, says):
    with pytest.raises(GrammarError, match=says.replace("(", r"\(")):
        compiled(grammars, source)


REFERENCES = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(5000)}
UNIONS = [{"anyOf": [{"properties": {f"a{n}{m}": {"const": m}}} for m in range(4)]} for n in range(14)]
HARD = [f"(a|b)*a(a|b){{{n}}}(a|b)*" for n in range(1, 40)]
LARK_RULES = [f'r{n}: "a" r{n + 1} | "b"' for n in range(CHAIN)]
GBNF_RULES = [f"r{n} ::= r{n + 1}" for n in range(CHAIN)]
HOSTILE = {
    "lists in lists": schema('{"type":"array","items":' * 10_000 + "{}" + "}" * 10_000),
    "references in a row": schema({"$defs": REFERENCES, "$ref": "#/$defs/d0"}),
    "patterns of names": schema({"patternProperties": {f"^x{n}q": {"type": "null"} for n in range(2000)}}),
    "patterns at once": schema({"allOf": [{"type": "string", "pattern": pattern} for pattern in HARD * 5]}),
    "many properties": schema({"properties": {f"p{n}": {"type": "null"} for n in range(9000)}}),
    "a long alternation": schema({"enum": [f"value {n}" for n in range(15_000)]}),
    "a long text": schema({"const": "ab" * 100_000}),
    "a product of unions": schema({"allOf": UNIONS}),
    "giant repeats": GrammarSource("regex", "(((a{1000}){1000}){1000}){1000}"),
    "exponential states": GrammarSource("regex", "(a|b)*a(a|b){1000}"),
    "many classes": GrammarSource("regex", r"(\p{L}\p{N}\w)*" * 2000),
    "many brackets": GrammarSource("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "intersections": GrammarSource("lark", "start: X\nX: " + " & ".join(f"/{pattern}/" for pattern in HARD)),
    "rules in a row": GrammarSource("lark", "\n".join(["start: r0", *LARK_RULES, f'r{CHAIN}: "z"'])),
    "brackets in brackets": GrammarSource("gbnf", "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "rules of one sign": GrammarSource("gbnf", "\n".join(["root ::= r0", *GBNF_RULES, f'r{CHAIN} ::= "z"', ""])),
    "ten megabytes": schema({"const": "a" * 10_000_000}),
}


SLOW = {"patterns of names", "patterns at once", "many properties", "giant repeats", "many classes", "rules of one sign"}


@pytest.mark.parametrize(
    "name", HOSTILE if os.environ.get("SLOTCACHE_HOSTILE") else [name for name in HOSTILE if name not in SLOW]
)
def test_a_hostile_grammar_ends_in_bounded_time_and_memory(model, grammars, name):
    """It is refused, or it is small enough to be used: then its first tokens are bounded, too."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        walk(model, compiled(grammars, HOSTILE[name]), limit=100)
    except GrammarError as error:
        assert len(str(error)) < 400
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
    assert accepts(model, compiled(grammars, schema({"type": "null"})), "null"), "the process was started again"


KILLS = [(number, has_ended) for number in (signal.SIGKILL, signal.SIGTERM) for has_ended in (True, False)]


@pytest.mark.parametrize(("number", "has_ended"), [*KILLS, (signal.SIGSEGV, True)])
def test_a_process_killed_between_two_grammars_refuses_none(model, grammars, number, has_ended):
    """Without a wait for its end, the next grammar may reach it before: a kill from outside is no fault of a grammar."""
    for text in ("first", "second", "third"):
        assert accepts(
            model, compiled(grammars, GrammarSource("regex", f"{text}{number}{has_ended}")), f"{text}{number}{has_ended}"
        )
        process = grammars._trial._process
        process.send_signal(number)
        if has_ended:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_compiled_grammars_are_kept_and_bounded(grammars):
    first = compiled(grammars, schema({"const": "first"}))
    assert compiled(grammars, schema({"const": "first"})) is first
    large = [schema({"const": n, "title": "x" * 60_000}) for n in range(KEPT // (BYTES_A_CHARACTER * 60_000) + 1)]
    for source in large:
        compiled(grammars, source)
    assert compiled(grammars, large[-1]) is compiled(grammars, large[-1])
    assert sum(grammar.num_bytes for grammar in grammars._kept.values()) == grammars._num_bytes <= KEPT
    assert schema({"const": "first"}) not in grammars._kept
    slow = grammars.compile(HOSTILE["intersections"])
    assert grammars.compile(large[-1]).done() and not slow.done(), "a kept one waits for no other"
    assert isinstance(slow.exception(), GrammarError) and grammars.num_waiting == 0


def test_answers_of_one_grammar_are_independent_of_each_other(model, grammars):
    grammar = compiled(grammars, schema({"type": "array", "items": {"enum": ["red", "green", 5]}, "maxItems": 6}))
    alone = [walk(model, grammar, seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda seed: walk(model, grammar, seed), range(8))) == alone


class SlowMatcher:
    """A matcher whose masks take a while."""

    def __init__(self, matcher, wait):
        self._matcher, self._wait = matcher, wait

    def __getattr__(self, name):
        return getattr(self._matcher, name)

    def unsafe_compute_mask_ptr(self, *given):
        self._wait()
        self._matcher.unsafe_compute_mask_ptr(*given)


def burn():
    began = time.thread_time()
    while time.thread_time() - began < 0.15:
        pass


@pytest.mark.parametrize(("wait", "fails"), [(burn, True), (lambda: time.sleep(0.15), False)], ids=["work", "sleep"])
def test_an_answer_fails_for_the_work_of_its_masks_and_not_for_a_busy_machine(model, grammars, wait, fails, monkeypatch):
    monkeypatch.setattr(grammar, "PATIENCE", 0.2)
    (letter,) = model.tokenize("a").tolist()
    constraint = compiled(grammars, GrammarSource("regex", "[ab]*")).start()
    constraint._matcher = SlowMatcher(constraint._matcher, wait)
    with ThreadPoolExecutor(1) as thread:
        for _ in range(4):
            compute_masks([constraint], thread)
            constraint.apply(np.zeros(model.num_vocab, np.float32))
            constraint.accept(letter)
    assert ("too long" in constraint.error) == fails


def test_slow_choices_end_a_draft(model, grammars, monkeypatch):
    """Else the masks of all its tokens would be computed in one step, for which all streams wait."""
    (letter,) = model.tokenize("a").tolist()
    sampler = Sampler(model, Sampling(temperature=0, grammar=compiled(grammars, GrammarSource("regex", "[ab]*"))))
    sampler.prime(np.empty(0, np.int32))
    rows = np.zeros((21, model.num_vocab), np.float32)
    rows[:, letter] = 1
    draft = np.full(20, letter, np.int32)
    clock, compute = [0.0], Constraint.compute
    monkeypatch.setattr(sampling, "perf_counter", lambda: clock[0])
    assert sampler.choose_along(draft, rows, None, 0) == letter and len(sampler.take_further()) == 20  # type: ignore[arg-type]
    monkeypatch.setattr(Constraint, "compute", lambda self: (clock.append(clock.pop() + ALONG / 4), compute(self)))
    assert sampler.choose_along(draft, rows, None, 0) == letter and len(sampler.take_further()) <= 5  # type: ignore[arg-type]
    sampler.close()


def test_names_of_an_object_do_not_multiply_its_schema(grammars):
    value = {"enum": ["x" * 2000]}
    few, many = ({"enum": [f"name {number}" for number in range(count)]} for count in (3, 3000))
    objects = {"type": "object", "additionalProperties": value}
    assert compiled(grammars, schema(objects | {"propertyNames": few})).left_out == ()
    assert compiled(grammars, schema(objects | {"propertyNames": many})).left_out == ("'propertyNames' at #",)
    for _ in range(6):
        value = {"type": "object", "propertyNames": {"enum": [*"abcdefghijkl"]}, "additionalProperties": value}
    assert any(what.startswith("'propertyNames' at #/") for what in compiled(grammars, schema(value)).left_out)
