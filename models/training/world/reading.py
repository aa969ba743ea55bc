"""Conversations about documents in freer wording."""

from __future__ import annotations

from random import Random

from .conversation import Conversation, Turn
from .freer import FreerWriter, Told
from .page import page_ids
from .question import Asker
from .recipe import Recipe
from .telling import Fact, Teller, load
from .wording import UNKNOWN, Style
from .words import Words
from .world import Sentence, Thing, World


class Reader:
    """Writes conversations whose answers are sentences of documents in freer wording."""

    def __init__(self, rng: Random, words: Words, reserved: frozenset[str] = frozenset()) -> None:
        self._rng, self._words = rng, words
        self._asked: set[int] = set()  # facts of the conversation by identity
        self._world = World(rng, words, reserved)
        self._teller = Teller(rng, words, self._world.names)
        self._writer = FreerWriter(self._world, self._teller)

    def write(self, recipe: Recipe) -> Conversation:
        """Return a conversation in a world of its own."""
        rng = self._rng
        self._asked.clear()
        system = self._words.pick(rng, "system") if rng.random() < recipe.system else ""
        pages = self._pages(rng.randint(*recipe.documents))
        later = pages[: len(pages) // 3] if len(pages) > 2 and rng.random() < recipe.later else []
        shown, read, turns = pages[len(later) :], list[Told](), list[Turn]()
        for number in range(num := rng.randint(*recipe.turns)):
            new = shown if number == 0 else later if later and number == num // 2 else []
            read += new
            turns.append(self._turn(recipe, read, new))
        return Conversation(system, tuple(turns))

    def _pages(self, count: int) -> list[Told]:
        rng = self._rng
        nouns = [self._words.pick(rng, "noun") for _ in range(rng.randint(5, 13))]
        nouns += [self._world.names.unknown_word() for _ in range(3)]
        main, same = self._writer.kind(), rng.choice((1.0, 0.6, 0.2, 0.0))
        things: list[tuple[Thing, str]] = []
        while len(things) < count:
            kind = main if rng.random() < same else self._writer.kind()
            thing = self._writer.thing(kind)
            if all(thing.bare.lower() != other.bare.lower() for other, _ in things):
                things.append((thing, kind))
        only = [thing for thing, _ in things]
        ids = page_ids(rng, only, False)
        named = zip(things, ids, strict=True)
        return [self._writer.write(thing, kind, name, others=only, nouns=nouns) for (thing, kind), name in named]

    def _turn(self, recipe: Recipe, read: list[Told], new: list[Told]) -> Turn:
        rng = self._rng
        asker = Asker(rng, Style(plain=False, plain_questions=False, bare=False, wordings=0, noise=recipe.noise, linked=0.0))
        target = rng.choice(new or read)
        thing = target.page.thing
        name, part, answer = thing.name, "", UNKNOWN
        if rng.random() >= recipe.unknown:
            fact, sentence = self._fresh(target)
            asked, part, answer = fact.attribute, fact.part, sentence.text
        elif thing.unsaid and rng.random() < 0.6:
            asked = rng.choice(thing.unsaid)
        else:  # a thing without a page
            kind = self._writer.kind()
            name = self._writer.thing(kind).name
            asked = self._teller.facts(load()[0][kind][1], 1, ["roof"])[0].attribute
            part = "roof"
        question = asker.typed(_worded(rng, rng.choice(asked.ask), name, part))
        documents = tuple(told.page for told in new)
        rank: tuple[str, ...] = ()
        if len(new) > 1 and rng.random() < recipe.hinted:
            rank = tuple(rng.sample([page.id for page in documents], len(documents)))
        return Turn(
            question=question, answer=answer, sort="free" if answer != UNKNOWN else "unknown", documents=documents, rank=rank
        )

    def _fresh(self, target: Told) -> tuple[Fact, Sentence]:
        """Return a fact that was not asked for yet, if there is one."""
        fresh = [one for one in target.facts if id(one[0]) not in self._asked]
        fact, sentence = self._rng.choice(fresh or target.facts)
        self._asked.add(id(fact))
        return fact, sentence


def _worded(rng: Random, ask: str, name: str, part: str) -> str:
    """Fill in the thing, or a part of it."""
    possessive = f"{name}'" if name.endswith("s") else f"{name}'s"
    whole = rng.choice((f"the {part} of {name}", f"the {part} of {name}", f"{possessive} {part}", f"the {part} at {name}"))
    text = ask.replace("{part}", whole).replace("{ns}", possessive).replace("{n}", name).replace("{o}", name)
    return text[:1].upper() + text[1:]
