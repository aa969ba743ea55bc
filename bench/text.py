"""English-like text of common words: a different text for every seed, the same text for one seed on every machine."""

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Large vocabularies and the bench model's small one have most of these words as one token: about 1.2 tokens a word.
ADJECTIVES = _words(
    "old new large small long short high low open full empty clear simple single special direct final current general "
    "public private local common complex original recent useful important known real exact normal standard complete "
    "late third"
)
NOUNS = _words(
    "time name list number value line word part point place case order example letter test program system process "
    "service user group level range table record section title state position side color screen window head hand body "
    "child library language city house world country book page year game family market road friend"
)
VERBS = _words(
    "opened closed changed called used found made returned read created removed copied started followed replaced "
    "passed described added listed raised tested compared checked sorted accepted ignored expected required handled "
    "stored built moved turned joined"
)
PREPOSITIONS = _words("after before above below inside under around without during between over from with against within")
OPENERS = (
    "At the same time",
    "In the first place",
    "For this reason",
    "After that",
    "In most cases",
    "As a result",
    "In this order",
    "On the other side",
    "At the end of the year",
    "In other words",
)


def prose(seed: str, words: int) -> str:
    """Return sentences of at least `words` words, and a few more, fixed by `seed`."""
    rng = random.Random(seed)  # a string seed goes through SHA-512: it depends on no hash seed and no platform
    sentences: list[str] = []
    count = 0
    while count < words:
        sentence = _sentence(rng)
        count += len(sentence.split())
        sentences.append(sentence)
    return " ".join(sentences)


def question(seed: str) -> str:
    """Return a question of about fifteen words, fixed by `seed`."""
    rng = random.Random(seed)
    first, second = _noun_phrase(rng), _noun_phrase(rng)
    return f"What did the {first} do when the {second} {rng.choice(VERBS)} it, and why did people remember it?"


def _sentence(rng: random.Random) -> str:
    clause = (
        f"the {_noun_phrase(rng)} {rng.choice(VERBS)} the {_noun_phrase(rng)} "
        f"{rng.choice(PREPOSITIONS)} the {_noun_phrase(rng)}"
    )
    if rng.random() < 0.5:
        return f"{rng.choice(OPENERS)}, {clause}."
    return f"{clause[0].upper()}{clause[1:]} and {rng.choice(VERBS)} a {_noun_phrase(rng)}."


def _noun_phrase(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
