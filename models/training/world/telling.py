"""Facts in freer wording: relations from tellings/, random parts, roles, counts and deeds, and the questions for them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from .names import Names
from .values import MONTHS, Values
from .wording import Attribute, Kind
from .words import Words
from .world import with_article

_DRAW = re.compile(r"<([\w ]+)>")
_OWN = re.compile(r"\{(noun|role|base|past|done)\}")
OF_PEOPLE = ("open.object", "open.product")
NO_S = ("s", "x", "y", "ch", "sh")  # no plural by one letter
_ARTICLE = re.compile(r"\ba(?= [aeio])")
_STEM = 4  # letters that `built` and `builds` share, about
FOLDER = Path(__file__).with_name("tellings")
UNITS = {
    "metres": ("metres", "feet"),
    "km": ("miles", "kilometres"),
    "kg": ("kilos", "pounds", "tons"),
    "years": ("years", "months"),
    "days": ("days", "weeks", "months"),
    "duration": ("minutes", "hours", "days"),
    "price": ("crowns", "pence", "florins", "dollars", "euros", "shillings", "francs"),
    "number": ("",),
    "count": ("",),
}
COPIED = frozenset(
    (
        "product",
        "material",
        "object",
        "food",
        "drink",
        "plant",
        "colour",
        "instrument",
        "animal",
        "noun",
        "adjective",
        "people",
        "firm",
    )
)
"""Sorts of everyday words whose places take words that no list has, too: the model must copy, not guess."""
_SMALL = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_PARTICIPLES = {
    "drew": "drawn",
    "wrote": "written",
    "stole": "stolen",
    "hid": "hidden",
    "broke": "broken",
    "ate": "eaten",
    "drank": "drunk",
    "sang": "sung",
    "showed": "shown",
    "wove": "woven",
    "wore": "worn",
    "saw": "seen",
    "rode": "ridden",
    "drove": "driven",
    "threw": "thrown",
}
"""Where they differ from the past tense."""


@dataclass(frozen=True, slots=True)
class Relation:
    """Something that documents tell of things. does: predicates; whole: sentences. paired: a question fits only the
    wording that it shares a word with.
    """

    name: str
    value: str
    does: tuple[str, ...]
    whole: tuple[str, ...]
    ask: tuple[str, ...]
    paired: bool


@dataclass(frozen=True, slots=True, eq=False)
class Fact:
    """A relation with its value. part: the noun that it is about, "" for the thing itself."""

    relation: Relation
    attribute: Attribute
    value: str
    does: str
    whole: str
    part: str


@cache
def load() -> tuple[dict[str, tuple[Kind, tuple[str, ...]]], dict[str, tuple[Relation, ...]]]:
    """Return the kinds with the names of their tables, and the relations of each table."""
    tables: dict[str, dict] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        tables |= tomllib.loads(path.read_text(encoding="utf-8"))
    kinds = {
        name: (
            Kind(
                nouns=tuple(row["nouns"]),
                names=row["names"],
                is_person=name == "person",
                article=row.get("article", False),
                attributes=(),
            ),
            tuple(row["of"]),
        )
        for name, row in tables.pop("kinds").items()
    }
    relations = {
        table: tuple(
            Relation(
                name=f"{table}.{name}",
                value=row["value"],
                does=tuple(row.get("does", ())),
                whole=tuple(row.get("whole", ())),
                ask=tuple(row["ask"]),
                paired=row.get("same", False),
            )
            for name, row in rows.items()
        )
        for table, rows in tables.items()
    }
    return kinds, relations


def stems(text: str) -> set[str]:
    """Return the first letters of the words of a text that carry meaning."""
    words = re.findall(r"[a-z]{3,}", re.sub(r"\{\w+\}|<[\w ]+>", " ", text.lower()))
    return {word[:_STEM] for word in words if word not in _PLAIN}


_PLAIN_WORDS = (
    "the was what who whom whose when where which how does did for from with that has had and its his her are were one "
    "can may year there they far many much long old into about after since kind sort name away day only"
)
_PLAIN = frozenset(_PLAIN_WORDS.split())


class Teller:
    """Draws facts about things."""

    def __init__(self, rng: Random, words: Words, names: Names) -> None:
        self._rng, self._words, self._names = rng, words, names
        self._values = Values(rng, words, names)

    def facts(self, tables: tuple[str, ...], count: int, nouns: list[str]) -> list[Fact]:
        """Return about `count` different facts for a thing of these tables. nouns: parts that the conversation uses."""
        rng, (_, relations) = self._rng, load()
        closed = [one for table in tables for one in relations[table]]
        chosen: list[Fact] = []
        for relation in rng.sample(closed, min(len(closed), max(1, round(count * rng.uniform(0.3, 0.9))))):
            chosen.append(self._fact(relation, ""))
        while len(chosen) < count:
            noun = rng.choice(nouns)
            if rng.random() < 0.5:
                two = rng.sample(relations["part"], 2 if rng.random() < 0.4 else 1)
                new = [self._fact(one, noun) for one in two]
            else:
                new = [self._fact(self._open(noun, "person" in tables), "")]
            if not any(noun in (fact.part, *fact.attribute.ask[0].split()) for fact in chosen):
                chosen += new
        return chosen

    def _fact(self, relation: Relation, part: str) -> Fact:
        rng = self._rng
        number = rng.randrange(max(len(relation.does), 1))
        does = relation.does[number] if relation.does else ""
        whole = rng.choice(relation.whole) if relation.whole else ""
        if whole and does and rng.random() < 0.5:
            does = ""
        elif does:
            whole = ""
        said = does or whole
        asks = [ask for ask in relation.ask if stems(ask) & stems(said)]
        if not relation.paired or not asks:
            asks = [*relation.ask, *asks, *asks]
        if part and relation.paired and len(relation.does) == len(relation.ask):
            asks = [relation.ask[number]]
        value = self.value(relation.value)
        attribute = Attribute("", relation.value, (), tuple(asks))
        return Fact(relation, attribute, value, does=self.fill(does), whole=self.fill(whole), part=part)

    def _open(self, noun: str, person: bool) -> Relation:
        """Return a relation that only its own words tell, with a noun, a role and a verb of its own."""
        base, past, done = self._verb()
        tables = load()[1]["open"]
        relation = self._rng.choice([one for one in tables if one.name in OF_PEOPLE] if person else tables)
        if relation.name == "open.count" and noun.endswith(NO_S):
            noun = "window"
        marks = {"noun": noun, "role": self._words.pick(self._rng, "role"), "base": base, "past": past, "done": done}

        def own(texts: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(_OWN.sub(lambda mark: marks[mark[1]], text) for text in texts)

        return replace(relation, does=own(relation.does), whole=own(relation.whole), ask=own(relation.ask))

    def _verb(self) -> tuple[str, str, str]:
        base, past = self._words.pick(self._rng, "verb").split()
        return base, past, _PARTICIPLES.get(past, past)

    def value(self, sort: str) -> str:
        """Return a value of a sort; numbers now and then in words."""
        rng = self._rng
        if sort == "small":
            return rng.choice(_SMALL)
        if sort == "area":
            return f"{self._number(40)} square {rng.choice(('miles', 'kilometres'))}"
        if sort in COPIED and rng.random() < 0.3:
            return self._copied(self._words.pick(rng, sort))
        if sort in UNITS and rng.random() < 0.45:
            return f"{self._number(900 if sort in ('number', 'count') else 99)} {rng.choice(UNITS[sort])}".strip()
        return self._values.draw(sort)

    def _copied(self, text: str) -> str:
        """Return the text with a word that no list has in place of its last word, or in front."""
        word = self._names.unknown_word()
        first, _, last = text.rpartition(" ")
        return f"{word} {last}" if self._rng.random() < 0.3 else f"{first} {word}".strip()

    def _number(self, most: int) -> str:
        rng = self._rng
        if rng.random() < 0.3:
            return str(rng.randrange(2, most))
        if most > 100 and rng.random() < 0.5:
            return f"{rng.choice(_SMALL[:8])} {rng.choice(('hundred', 'thousand'))}"
        return rng.choice(_SMALL) if rng.random() < 0.5 else f"{rng.choice(_TENS)}-{rng.choice(('one', *_SMALL[:8]))}"

    def fill(self, text: str) -> str:
        """Return the text with a word for each <sort>."""
        for _ in range(3):  # a draw may hold marks again
            text = _DRAW.sub(self._drawn, text)
        return _ARTICLE.sub("an", text)

    def _drawn(self, mark: re.Match[str]) -> str:
        rng, sort = self._rng, mark[1]
        if sort.startswith("a "):
            return with_article(self._words.pick(rng, sort[2:]))
        if sort[0].isupper():
            text = self._words.pick(rng, sort.lower())
            return text[:1].upper() + text[1:]
        if sort in ("base", "past", "part"):
            return self._verb()[("base", "past", "part").index(sort)]
        if sort == "month":
            return rng.choice(MONTHS)
        if sort not in self._words:
            return self.value(sort)
        text = self._words.pick(rng, sort)
        return self._copied(text) if sort in COPIED and rng.random() < 0.15 else text
