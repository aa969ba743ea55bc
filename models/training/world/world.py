"""Invented things, and sentences about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from .names import Names
from .values import OPEN, Values
from .wording import LEAD_ASK, LEAD_SAY, PLAIN_SAY, Attribute, Kind, Style, load_kinds
from .words import Words

VOWELS = tuple("aeio")
LEAD = Attribute("", "", LEAD_SAY, LEAD_ASK)
"""The kind of a thing. An attribute without a label is worded only by its own templates."""


COUNTED = frozenset(("object", "animal", "profession", "creature"))
"""Sorts of values that take an article."""

SMALL = frozenset(
    (
        "It",
        "Its",
        "The",
        "She",
        "He",
        "Her",
        "His",
        "There",
        "A",
        "An",
        "About",
        "In",
        "On",
        "At",
        "Over",
        "Every",
        "Everybody",
        "One",
        "You",
        "Visitors",
        "People",
        "This",
        "Guests",
        "Children",
        "Members",
        "Passengers",
        "Hikers",
        "Bicycles",
        "Today",
    )
)
"""Words that lose their capital inside a sentence."""


@dataclass(slots=True, eq=False)
class Thing:
    """A subject of documents. name: as in running text, with its article. unsaid: attributes left out."""

    kind: Kind
    name: str
    noun: str
    pronouns: tuple[str, str, str]
    """As a subject, a possessor and an object: she, her, her."""
    unsaid: list[Attribute] = field(default_factory=list)

    @property
    def bare(self) -> str:
        """The name without its article."""
        return self.name.removeprefix("the ")


@dataclass(frozen=True, slots=True, eq=False)
class Sentence:
    """One sentence of a document. facts: the attributes it tells, with their values. named: whether it names the thing."""

    text: str
    facts: tuple[tuple[Attribute, str], ...]
    named: bool


class World:
    """Draws things and sentences."""

    def __init__(self, rng: Random, words: Words, reserved: frozenset[str] = frozenset()) -> None:
        self.rng, self.words = rng, words
        self.names = Names(rng, words, reserved)
        self._values = Values(rng, words, self.names)
        self._kinds = load_kinds()
        self._names_of_kinds = tuple(self._kinds)

    def kind(self, names: Sequence[str] = ()) -> Kind:
        """Return a random kind, of these names if given."""
        return self._kinds[self.rng.choice(names or self._names_of_kinds)]

    def thing(self, kind: Kind, like: Thing | None = None) -> Thing:
        """Return a thing with a new name. like: another thing for which it is easily mistaken."""
        rng = self.rng
        noun = like.noun if like else rng.choice(kind.nouns)
        name = self.names.similar(like.bare) if like else self.names.draw(kind.names, noun)
        article = kind.article and not name.startswith("The ") and (like is None or like.name != like.bare)
        if like is None and kind.article and kind.names == "model" and rng.random() < 0.3:
            article = False
        pronouns = rng.choice((("she", "her", "her"), ("he", "his", "him"))) if kind.is_person else ("it", "its", "it")
        return Thing(kind, f"the {name}" if article else name, noun, pronouns)

    def attributes(self, kind: Kind, count: int, open_share: float, labelled: bool) -> list[Attribute]:
        """Return different attributes of a kind, some of them made up. labelled: made-up attributes have labels."""
        rng = self.rng
        chosen = rng.sample(kind.attributes, min(count, len(kind.attributes)))
        for at in range(len(chosen)):
            if rng.random() < open_share:
                chosen[at] = self._open_attribute(labelled)
        labels: dict[str, Attribute] = {}
        for attribute in chosen:
            labels.setdefault(attribute.label or attribute.ask[0], attribute)
        return list(labels.values())

    def _open_attribute(self, labelled: bool) -> Attribute:
        """Return a made-up attribute: its meaning is clear only from its words."""
        rng, words = self.rng, self.words
        sort = rng.choice(OPEN)
        if not labelled and rng.random() < 0.45:
            base, past = words.pick(rng, "verb").split()
            asks = (f"What did {{n}} {base}?", f"Which thing did {{n}} {base}?", f"What did {{n}} {base} then?")
            value, article = rng.choice(
                (("object", "a "), ("object", "a "), ("animal", "a "), ("product", ""), ("food", ""))
            )
            where = rng.random()
            if where < 0.3:
                place = self._values.draw("place")
                says = (f"{{It}} {past} {article}{{v}} in {place}.", f"In {place} {{n}} {past} {article}{{v}}.")
                asks = (*asks, f"What did {{n}} {base} in {place}?")
            elif where < 0.5:
                thing, value = words.pick(rng, "object"), rng.choice(("place", "year"))
                says = (f"{{It}} {past} a {thing} in {{v}}.", f"In {{v}} {{n}} {past} a {thing}.")
                word = "Where" if value == "place" else "When"
                asks = (f"{word} did {{n}} {base} a {thing}?", f"{word} did {{n}} {base} the {thing}?")
            else:
                it = f"{past} {article}{{v}}"
                says = (f"{{It}} {it}.", f"Once {{n}} {it}.", f"{{It}} {it} last year.")
            return Attribute("", value, says, asks)
        label = words.pick(rng, "noun")
        if rng.random() < 0.3:
            label = f"{words.pick(rng, rng.choice(('noun', 'adjective')))} {label}".replace("well known", "famous")
        says = (
            *PLAIN_SAY,
            f"{{It}} has a {label} of {{v}}.",
            f"Its {label} is called {{v}}.",
            f"The {label} comes from {{v}}.",
        )
        asks = (f"What about the {label} of {{n}}?", f"What is the {label} at {{n}}?", f"And the {label} of {{n}}?")
        return Attribute(label, sort, says, asks)

    def value(self, attribute: Attribute) -> str:
        return self._values.draw(attribute.value)

    def say(self, thing: Thing, attribute: Attribute, value: str, *, by: str, style: Style) -> Sentence:
        """Return a sentence for one fact. by: the form of its subject: name, pronoun or noun."""
        rng = self.rng
        says = attribute.say
        if style.wordings:
            says = sorted(says, key=lambda say: say.startswith("{v}"))[: style.wordings]
        if attribute.label and (style.plain or rng.random() < 0.15):
            says = PLAIN_SAY if not style.plain else PLAIN_SAY[2:] if style.bare else PLAIN_SAY[:2]
        template = rng.choice(says)
        if style.bare and attribute.value in COUNTED and not value.startswith("pair"):
            value = with_article(value)
        text = self._fill(template, thing, (attribute, value), by=by, style=style)
        return Sentence(text, ((attribute, value),), thing.bare in text)

    def _fill(self, template: str, thing: Thing, fact: tuple[Attribute, str], *, by: str, style: Style) -> str:
        (attribute, value), noun = fact, thing.noun
        subject, possessor, _ = thing.pronouns
        if by == "name":
            subject, possessor = thing.name, _possessive(thing.name)
        elif by == "noun" and not thing.kind.is_person:
            subject, possessor = f"the {noun}", f"the {noun}'s"
        text = template
        if thing.kind.is_person:
            text = text.replace("Its ", "{Its} ").replace("It ", "{It} ")
        for mark, filling in (
            ("{It}", _upper(subject)), ("{Its}", _upper(possessor)), ("{N}", _upper(thing.name)), ("{n}", thing.name),
            ("{noun}", noun), ("{label}", attribute.label),
        ):  # fmt: skip
            text = text.replace(mark, filling)
        text = self._fill_rest(text, noun)
        if value.startswith(VOWELS):
            text = text.replace(" a {v}", " an {v}")
        elif value.startswith("pair"):
            text = text.replace("the {v}", "a {v}")
        text = _upper(text.replace("{v}", value))
        return text if style.plain or self.rng.random() > 0.12 * style.noise else self._decorated(text, thing)

    def _decorated(self, text: str, thing: Thing) -> str:
        """Add a few words, in front or at the end."""
        rng = self.rng
        if rng.random() < 0.5 or not text.endswith("."):
            first = text.split(" ", 1)[0]
            start = text[:1].lower() + text[1:] if first in SMALL and not text.startswith(thing.name) else text
            return f"{self.words.pick(rng, 'opening')} {start}"
        return f"{text[:-1]}{self.words.pick(rng, 'ending')}."

    def _fill_rest(self, text: str, noun: str) -> str:
        rng = self.rng
        if "{" not in text.replace("{v}", ""):
            return text
        adjective = self.words.pick(rng, "adjective")
        for mark, draw in (
            ("{a_noun}", lambda: with_article(noun)), ("{a_adjective}", lambda: with_article(adjective)),
            ("{year}", lambda: self._values.draw("year")), ("{person}", lambda: self._values.draw("person")),
            ("{direction}", lambda: self.words.pick(rng, "direction")),
        ):  # fmt: skip
            if mark in text:
                text = text.replace(mark, draw())
        return text


def with_article(noun: str) -> str:
    """Put `a` or `an` in front."""
    return f"{'an' if noun.startswith(VOWELS) else 'a'} {noun}"


def _possessive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
