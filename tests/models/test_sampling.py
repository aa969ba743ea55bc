"""The choice of a token: as llama.cpp's own samplers choose it in llama-server's order, and as each sampler is defined."""

import ctypes
import random

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.context import Context, ContextSettings
from slotcache.models.model import Model
from slotcache.models.penalties import Breakers, grown, repeated
from slotcache.models.runner import Runner
from slotcache.models.sampling import Sampler, TokenList
from slotcache.models.sampling_params import GREEDY, MAX_WINDOW, NUMBERS, ORDER, SAMPLERS, Sampling
from slotcache.slots.plan import Plan, Span
from support import more_llama

LONG = 40  # tokens of an answer here


class Bench:
    """One row of logits of a real context, whose numbers the tests write."""

    def __init__(self, path):
        self.model = Model(path)
        self.context = Context(self.model, ContextSettings(num_cells=64, threads=1, num_sequences=4))
        runner = Runner(self.context)
        runner.run(Plan((), (Span(0, 0, 0, np.zeros(4, np.int32), logits=True),)), {0: Sampler(self.model, GREEDY)})
        self.row = runner.logits(1)[0]

    def answer(self, sampling, rows, prompt=()):
        """Return the tokens chosen from each of these rows, and the sampler's logprobs of each."""
        sampler = Sampler(self.model, sampling)
        sampler.prime(np.array(prompt, np.int32))
        found = []
        for row in rows:
            self.row[:] = row
            found.append((sampler.choose(self.row, self.context.handle, 3), sampler.take_logprobs()))
        sampler.close()
        return [token for token, _ in found], [logprobs for _, logprobs in found]

    def tokens(self, sampling, rows, prompt=()):
        return self.answer(sampling, rows, prompt)[0]

    def reference(self, sampling, rows, prompt=()):
        """The tokens that a chain of nothing but llama.cpp's own samplers chooses."""
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for link in reference_links(self.model, sampling):
            llama.llama_sampler_chain_add(chain, link)
        for token in prompt:
            llama.llama_sampler_accept(chain, int(token))
        tokens = []
        for row in rows:
            candidates = TokenList(row)
            candidates.apply(chain)
            tokens.append(candidates.chosen)
            llama.llama_sampler_accept(chain, tokens[-1])
        llama.llama_sampler_free(chain)
        return tokens

    def close(self):
        self.context.close()
        self.model.close()


def reference_links(model, s):
    """The links of llama-server's chain, with its own arguments, as its documentation orders them."""
    seed = s.seed & 0xFFFFFFFF
    if s.logit_bias:
        bias = (more_llama.llama_logit_bias * len(s.logit_bias))(*s.logit_bias.items())
        yield more_llama.llama_sampler_init_logit_bias(model.num_vocab, len(bias), bias)
    if s.mirostat:
        yield llama.llama_sampler_init_temp(s.temperature)
        if s.mirostat == 1:
            yield llama.llama_sampler_init_mirostat(model.num_vocab, seed, s.mirostat_tau, s.mirostat_eta, 100)
        else:
            yield llama.llama_sampler_init_mirostat_v2(seed, s.mirostat_tau, s.mirostat_eta)
        return
    texts = [text.encode() for text in s.dry_sequence_breakers]
    dry = (s.dry_multiplier, s.dry_base, s.dry_allowed_length, s.dry_penalty_last_n)
    links = {
        "penalties": lambda: more_llama.llama_sampler_init_penalties(
            model.num_vocab, s.repeat_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
        ),
        "dry": lambda: more_llama.llama_sampler_init_dry(
            model.vocab, *dry, (ctypes.c_char_p * len(texts))(*texts), len(texts)
        ),
        "top_n_sigma": lambda: llama.llama_sampler_init_top_n_sigma(s.top_n_sigma),
        "top_k": lambda: llama.llama_sampler_init_top_k(s.top_k),
        "typ_p": lambda: llama.llama_sampler_init_typical(s.typical_p, s.min_keep),
        "top_p": lambda: llama.llama_sampler_init_top_p(s.top_p, s.min_keep),
        "min_p": lambda: llama.llama_sampler_init_min_p(s.min_p, s.min_keep),
        "xtc": lambda: llama.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, s.min_keep, seed),
        "temperature": lambda: llama.llama_sampler_init_temp_ext(s.temperature, s.dynatemp_range, s.dynatemp_exponent),
        "infill": lambda: llama.llama_sampler_init_infill(model.vocab),
    }
    for name in s.samplers:
        if name in links:
            yield links[name]()
    if "adaptive_p" in s.samplers:
        yield llama.llama_sampler_init_adaptive_p(s.adaptive_target, s.adaptive_decay, seed)
    else:
        yield llama.llama_sampler_init_dist(seed)


@pytest.fixture(scope="module")
def bench(tiny):
    bench = Bench(tiny)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def rows(bench):
    """Rows of logits in which a few tokens are likely, so that answers repeat themselves."""
    noise = np.random.default_rng(7)
    common = noise.normal(0, 2, bench.model.num_vocab)
    common[noise.integers(0, len(common), 12)] += 6
    return [(common + noise.normal(0, 1, len(common))).astype(np.float32) for _ in range(LONG)]


def random_sampling(rng):
    """Some parameters away from their defaults, and the samplers in any order."""
    values_of = {
        "temperature": [0.0, 0.3, 1.0, 2.5],
        "dynatemp_range": [0.5],
        "dynatemp_exponent": [2.0],
        "top_k": [0, 1, 5, 200],
        "top_p": [0.3, 1.0],
        "min_p": [0.0, 0.3],
        "top_n_sigma": [0.5, 2.0],
        "typical_p": [0.4, 0.9],
        "min_keep": [3],
        "xtc_probability": [0.5, 1.0],
        "xtc_threshold": [0.02, 0.2],
        "repeat_last_n": [0, 5, 300],
        "repeat_penalty": [0.5, 1.3],
        "presence_penalty": [-1.0, 0.7],
        "frequency_penalty": [0.4],
        "dry_multiplier": [0.8, 3.0],
        "dry_base": [1.0, 1.2, 3.0],
        "dry_allowed_length": [0, 1, 4],
        "dry_penalty_last_n": [8, 300],
        "mirostat": [1, 2],
        "mirostat_tau": [1.0, 3.0],
        "mirostat_eta": [0.4],
        "adaptive_target": [0.1, 0.6],
        "adaptive_decay": [0.0, 0.5],
        "dry_sequence_breakers": [(), ("e",), (" th", "\n")],
    }
    given = {name: rng.choice(values) for name, values in values_of.items() if rng.random() < 0.3}
    if rng.random() < 0.8:
        given.pop("mirostat", None)
    if rng.random() < 0.5:
        names = rng.sample([*ORDER, "infill", "adaptive_p"], rng.randint(0, len(SAMPLERS)))
        if "infill" in names:  # here it sees at most 128 tokens
            names.insert(names.index("infill"), "top_k")
            given["top_k"] = rng.choice([5, 100])
        given["samplers"] = tuple(names)
    return Sampling(seed=rng.randrange(1 << 32), **given)


def test_random_parameters_choose_what_llama_cpp_chooses(bench, rows):
    rng = random.Random(3)
    differs = []
    for _ in range(300):
        sampling = random_sampling(rng)
        prompt = [int(rows[rng.randrange(LONG)].argmax()) for _ in range(rng.choice([0, 3, 200]))]
        biases = {rng.randrange(bench.model.num_vocab): rng.uniform(-5, 5) for _ in range(rng.choice([0, 3]))}
        sampling = sampling.changed({"logit_bias": biases})
        if bench.tokens(sampling, rows, prompt) != bench.reference(sampling, rows, prompt):
            differs.append(sampling)
    assert not differs


def test_the_defaults_are_llama_server_s():
    shown = Sampling(seed=5).shown()
    order = "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature"
    assert shown["samplers"] == order.split()
    assert shown["seed"] == 5 and shown["min_keep"] == 0 and shown["mirostat_tau"] == 5.0
    assert shown["dry_sequence_breakers"] == ["\n", ":", '"', "*"] and shown["n_probs"] == 0
    assert set(NUMBERS) < set(shown)


PROBABILITIES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def likely(bench):
    """A row whose first tokens have these probabilities, and all others none."""
    row = np.full(bench.model.num_vocab, -1e4, np.float32)
    row[:5] = np.log(PROBABILITIES)
    return row


def chosen(bench, row, **fields):
    """All tokens that are chosen from a row, at temperature 1 and by these samplers only."""
    unset = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
    return set(bench.tokens(Sampling(seed=11, **unset | fields), [row] * 300))


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.6, "min_keep": 3}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"typical_p": 0.4}, {1, 2}),  # their surprise is nearest to the entropy
        ({"top_n_sigma": 1e-4}, {0, 1, 2, 3}),  # 2e4 standard deviations wide, of which the others take most
        ({"top_n_sigma": 1e-6}, {0}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.12}, {2, 3, 4}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.6}, {0, 1, 2, 3, 4}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.0, "samplers": ("top_k",), "top_k": 2}, {0, 1}),
        ({"logit_bias": {0: -np.inf, 3: -np.inf}}, {1, 2, 4}),
        ({"logit_bias": {9: 1e9}}, {9}),
        ({"banned": frozenset({0, 1, 2, 3})}, {4}),
        ({"dynatemp_range": 1.0, "dynatemp_exponent": 1e9}, {0}),  # the entropy is not the greatest, so 0 is left of it
        ({"mirostat": 2, "mirostat_tau": 0.0, "mirostat_eta": 0.0}, {0}),
        ({"samplers": ("top_k", "adaptive_p"), "top_k": 2, "adaptive_target": 0.2}, {0, 1}),
    ],
)
def test_each_sampler_leaves_what_its_definition_says(bench, fields, left):
    row = likely(bench)
    if "top_n_sigma" in fields:
        row[5:] = row[5:] / 1e3  # -10: with them the standard deviation is not all that there is
        scale = row.std()
        wanted = fields["top_n_sigma"] * scale
        left = {token for token in range(len(row)) if row[token] >= row.max() - wanted}
    assert chosen(bench, row, **fields) == left


def test_the_order_of_samplers_matters(bench):
    row = likely(bench)
    first = chosen(bench, row, top_k=3, top_p=0.8, samplers=("top_k", "top_p"))
    assert first == {0, 1}  # of the three, the first two have 0.82
    assert chosen(bench, row, top_k=3, top_p=0.8, samplers=("top_p", "top_k")) == {0, 1, 2}


def test_penalties_count_the_prompt_and_the_answer(bench):
    row = likely(bench)
    assert bench.tokens(Sampling(temperature=0, presence_penalty=0.5), [row] * 3, [0]) == [1, 0, 0]
    assert bench.tokens(Sampling(temperature=0, frequency_penalty=0.2), [row] * 4) == [0, 0, 1, 0]
    assert bench.tokens(Sampling(temperature=0, presence_penalty=9, repeat_last_n=1), [row] * 4) == [0, 1, 0, 1]
    assert bench.tokens(Sampling(temperature=0, presence_penalty=9, repeat_last_n=0), [row] * 2) == [0, 0]
    far = [0] + [7] * (MAX_WINDOW - 1)
    assert bench.tokens(Sampling(temperature=0, presence_penalty=9, repeat_last_n=-1), [row], far) == [1]
    assert bench.tokens(Sampling(temperature=0, presence_penalty=9, repeat_last_n=-1), [row], [*far, 7]) == [0]


def test_dry_forbids_the_next_token_of_a_repeated_sequence(bench):
    row, said = likely(bench), [5, 6, 0, 7, 8, 5, 6]
    assert bench.tokens(Sampling(temperature=0, dry_multiplier=9), [row], said) == [1]
    assert bench.tokens(Sampling(temperature=0, dry_multiplier=9, dry_allowed_length=3), [row], said) == [0]
    assert bench.tokens(Sampling(temperature=0, dry_multiplier=9, dry_penalty_last_n=4), [row], said) == [0]
    breaker = bench.model.piece(6).decode("utf-8", "replace")
    assert bench.tokens(Sampling(temperature=0, dry_multiplier=9, dry_sequence_breakers=(breaker,)), [row], said) == [0]


def test_repeated_sequences_are_found_as_by_their_definition():
    rng = np.random.default_rng(5)
    for size in range(1, 60):
        tokens = rng.integers(0, 3, size).astype(np.int32)
        slow = [next(n for n in range(at + 2) if n > at or tokens[at - n] != tokens[size - 1 - n]) for at in range(size - 1)]
        assert repeated(tokens).tolist() == slow
        for dropped in (0, 1):
            longer = np.append(tokens, rng.integers(0, 3)).astype(np.int32)[dropped:]
            if len(longer) > 1:
                assert grown(repeated(tokens), longer).tolist() == repeated(longer).tolist()


def test_breakers_are_found_over_the_borders_of_tokens():
    breakers = Breakers(("xyz", "\n"))
    for pieces, since in (([b"ab", b"cd"], 2), ([b"ax"], 3), ([b"y"], 4), ([b"zq"], 0), ([b"a", b"\n", b"", b"b"], 2)):
        breakers.extend(pieces)
        assert breakers.since == since
    assert breakers.are_in(b"-xyz-") and not breakers.are_in(b"xy")


def test_a_seed_fixes_an_answer_and_each_choice_has_its_own(bench, rows):
    hot = Sampling(seed=4, temperature=3.0)
    assert bench.tokens(hot, rows) == bench.tokens(hot, rows) == bench.tokens(hot.varied(0), rows)
    assert bench.tokens(hot, rows) != bench.tokens(hot.varied(1), rows) != bench.tokens(hot.varied(2), rows)
    seeded = [Sampling().seeded().seed for _ in range(3)]
    assert len(set(seeded)) == 3 and all(0 <= seed < 2**32 - 1 for seed in seeded)


@pytest.mark.parametrize("most", [0, 1, 7, 10**6])
def test_the_chances_are_those_of_the_model(bench, rows, most):
    sampling = Sampling(seed=1, n_probs=most, repeat_penalty=3.0, logit_bias={3: 9.0})
    tokens, logprobs = bench.answer(sampling, rows)
    assert tokens == bench.tokens(Sampling(seed=1, repeat_penalty=3.0, logit_bias={3: 9.0}), rows)
    for row, token, found in zip(rows, tokens, logprobs, strict=True):
        exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        assert found.token == token and found.logprob == pytest.approx(exact[token], abs=1e-5)
        best = np.argsort(-exact, kind="stable")[:most]
        assert found.top_tokens.tolist() == best.tolist()
        assert found.top_logprobs == pytest.approx(exact[best], abs=1e-5)


def test_the_chances_after_sampling_are_what_the_samplers_left(bench):
    row = likely(bench)
    asked = {"n_probs": 10, "post_sampling_probs": True, "seed": 2}
    tokens, logprobs = bench.answer(Sampling(temperature=1.0, top_p=0.8, min_p=0, **asked), [row] * 50)
    assert tokens == bench.tokens(Sampling(temperature=1.0, top_p=0.8, min_p=0, seed=2), [row] * 50)
    for token, found in zip(tokens, logprobs, strict=True):
        assert found.top_tokens.tolist() == [0, 1, 2] and np.exp(found.top_logprobs).sum() == pytest.approx(1)
        assert found.logprob == pytest.approx(np.log(PROBABILITIES[token] / 0.85), abs=1e-5)
    for temperature in (0.0, 1e-6):
        _, (found,) = bench.answer(Sampling(temperature=temperature, **asked), [row])
        assert (found.token, found.logprob, found.top_tokens.tolist()) == (0, 0.0, [0])
