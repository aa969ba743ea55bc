"""Documents in freer wording: two facts a sentence, pronouns, relative clauses, remarks that answer nothing."""

from __future__ import annotations

from dataclasses import dataclass

from .page import Page
from .telling import Fact, Teller, load
from .world import VOWELS, Sentence, Thing, World, with_article

UNTOLD = 2  # facts of a thing that its page leaves out, for questions without an answer


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """A page, and what it tells: each fact with its sentence."""

    page: Page
    facts: tuple[tuple[Fact, Sentence], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Telling(Sentence):
    """A sentence with what it tells."""

    told: tuple[Fact, ...] = ()


class FreerWriter:
    """Writes pages about things of any kind."""

    def __init__(self, world: World, teller: Teller) -> None:
        self._world, self._teller, self._rng = world, teller, world.rng

    def kind(self) -> str:
        return self._rng.choice(tuple(load()[0]))

    def thing(self, kind: str) -> Thing:
        return self._world.thing(load()[0][kind][0])

    def write(self, thing: Thing, kind: str, identity: str, *, others: list[Thing], nouns: list[str]) -> Told:
        """Return a page with 4 to 8 facts. Two more are drawn and stay untold, as `thing.unsaid`."""
        rng = self._rng
        facts = self._teller.facts(load()[0][kind][1], rng.randint(4, 8) + UNTOLD, nouns)
        rng.shuffle(facts)
        facts, thing.unsaid = facts[UNTOLD:], [fact.attribute for fact in facts[:UNTOLD] if not fact.part]
        thing.unsaid = [one for one in thing.unsaid if all(one.value != fact.attribute.value for fact in facts)]
        sentences: list[Telling] = []
        while facts:
            sentences.append(self._sentence(thing, facts, first=not sentences))
        told = tuple((fact, sentence) for sentence in sentences for fact in sentence.told)
        parts = [sentence.text for sentence in sentences]
        while rng.random() < 0.3:
            parts.insert(rng.randrange(1, len(parts) + 1), self._remark(others))
        title = (
            _upper(thing.name if rng.random() < 0.5 else thing.bare) if rng.random() < 0.88 or not sentences[0].named else ""
        )
        text = " ".join(parts) if rng.random() < 0.9 else "\n\n".join(parts)
        return Told(Page(id=identity, title=title, text=text, thing=thing, sentences=tuple(sentences)), told)

    def _remark(self, others: list[Thing]) -> str:
        words, rng = self._world.words, self._rng
        if others and rng.random() < 0.15:
            return _upper(words.pick(rng, "mention").format(rng.choice(others).name))
        return words.pick(rng, "filler") if rng.random() < 0.3 else _upper(self._teller.fill(words.pick(rng, "remark")))

    def _sentence(self, thing: Thing, facts: list[Fact], first: bool) -> Telling:
        """Take one or two facts from the list and return their sentence."""
        rng = self._rng
        one = facts.pop(0)
        if first and not one.does and rng.random() < 0.7:  # begin with a predicate of the thing itself, if there is one
            better = next((fact for fact in facts if fact.does and not fact.part), None)
            if better:
                facts.remove(better)
                facts.insert(0, one)
                one = better
        used = [one]
        if one.does:
            other = next((fact for fact in facts if fact.does and fact.part == one.part), None)
            if other and (one.part or rng.random() < 0.5):
                facts.remove(other)
                used.append(other)
            text = self._predicates(thing, used, first)
        else:
            text = self._whole(thing, one, "first" if first else "later")
            other = next((fact for fact in facts if fact.whole), None)
            if other and len(text) < 60 and rng.random() < 0.25:
                facts.remove(other)
                used.append(other)
                joint = rng.choice((", and", ", and", ", but", ";", ", while"))
                second = self._whole(thing, other, "joined")
                second = second[:1].lower() + second[1:] if other.whole[:1].isalpha() else second  # no value, no name
                text = f"{text[:-1]}{joint} {second}"
        text = _upper(text)
        pairs = tuple((fact.attribute, fact.value) for fact in used)
        return Telling(text, pairs, thing.bare in text, tuple(used))

    def _predicates(self, thing: Thing, facts: list[Fact], first: bool) -> str:
        rng, who = self._rng, "who" if thing.kind.is_person and not facts[0].part else "which"
        subject = self._part(thing, facts[0].part) if facts[0].part else self._subject(thing, first)
        it = "it" if facts[0].part else thing.pronouns[0]
        one, *rest = [self._said(thing, fact.does, fact, "later") for fact in facts]
        lead = first and not facts[0].part and not thing.kind.is_person
        if lead and rng.random() < 0.4:
            noun = with_article(
                thing.noun if rng.random() < 0.7 else f"{self._world.words.pick(rng, 'adjective')} {thing.noun}"
            )
            if rng.random() < 0.3:
                subject = f"{subject}, {noun},"
            elif rest:
                return rng.choice(
                    (f"{subject} is {noun} that {one} and {rest[0]}.", f"{subject}, {noun} that {one}, {rest[0]}.")
                )
            else:
                return f"{subject} is {noun} that {one}."
        if rest:
            comma = "" if subject.endswith(",") else ","
            joint = rng.choice((" and", " and", f", and {it}", f", but {it}", f"; {it}", ""))
            return f"{subject} {one}{joint} {rest[0]}." if joint else f"{subject}{comma} {who} {one}, {rest[0]}."
        way = rng.random()
        if way > 0.88 and not thing.kind.is_person:
            return f"{self._teller.fill('<lead>')} {subject} {one}."
        if way < 0.15 and not subject.endswith(","):
            return f"{subject}, {who} {self._deed(thing, facts[0])}, {one}."
        if way < 0.3:
            return f"{subject} {one} {self._teller.fill('<tail>')}."
        if way < 0.4:
            return f"{subject} {one} and {self._deed(thing, facts[0])}."
        return f"{subject} {one}."

    def _deed(self, thing: Thing, fact: Fact) -> str:
        """Return a predicate that answers nothing."""
        if thing.kind.is_person and not fact.part:
            return self._teller.fill("<deed>")
        return self._teller.fill("<use>")

    def _whole(self, thing: Thing, fact: Fact, place: str) -> str:
        """Return a sentence of its own. place: `first` in a document, `later`, or `joined` to another sentence."""
        text = fact.whole
        if place == "first" and not ("{It}" in text or "{Its}" in text):
            text = text.replace("{it}", thing.name).replace("{its}", _possessive(thing.name))
        return self._said(thing, text, fact, place)

    def _said(self, thing: Thing, text: str, fact: Fact, place: str) -> str:
        """Fill in the thing and the value."""
        rng, (subject, possessor, other) = self._rng, thing.pronouns
        pronoun, first = subject, place == "first"
        its = possessor
        if place != "joined" and (first or rng.random() < 0.4):
            subject = self._subject(thing, first)
        if place != "joined" and (first or rng.random() < 0.35):
            possessor = _possessive(self._subject(thing, first))
        inside = pronoun if thing.kind.is_person else other if rng.random() < 0.7 else self._subject(thing, False)
        for mark, filling in (("{It}", subject), ("{Its}", possessor), ("{its}", its), ("{o}", other), ("{it}", inside)):
            text = text.replace(mark, filling)
        if fact.value.startswith(VOWELS):
            text = text.replace(" a {v}", " an {v}")
        elif fact.value.startswith("pair"):
            text = text.replace("the {v}", "a {v}")
        return text.replace("{v}", fact.value)

    def _subject(self, thing: Thing, first: bool) -> str:
        rng = self._rng
        if first:
            return thing.name
        way = rng.random()
        if thing.kind.is_person:
            return thing.pronouns[0] if way < 0.7 else thing.bare.split()[-1] if way < 0.85 else thing.name
        return thing.pronouns[0] if way < 0.55 else f"the {thing.noun}" if way < 0.85 else thing.name

    def _part(self, thing: Thing, part: str) -> str:
        rng = self._rng
        head = rng.choice((thing.pronouns[1], thing.pronouns[1], "the", "the"))
        middle = f"{self._world.words.pick(rng, 'adjective')} " if rng.random() < 0.3 else ""
        return f"{head} {middle}{part}"


def _possessive(name: str) -> str:
    if name in ("it", "she", "he"):
        return {"it": "its", "she": "her", "he": "his"}[name]
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
