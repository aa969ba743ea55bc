"""Documents of the invented world: an id, a title and 40 to 120 tokens of text."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .wording import Attribute, Style
from .world import LEAD, SMALL, Sentence, Thing, World

TITLES = (
    "{N}",
    "{N}",
    "{N}",
    "About {n}",
    "{N} ({noun})",
    "{N}: facts",
    "The {noun} {b}",
    "{N} - an overview",
    "All about {n}",
)


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """A document about one thing. sentences: those with facts, word for word as in the text."""

    id: str
    title: str
    text: str
    thing: Thing
    sentences: tuple[Sentence, ...]

    def telling(self, attribute: Attribute) -> Sentence | None:
        """Return the sentence that tells this attribute, if any."""
        return next((one for one in self.sentences if any(fact[0] is attribute for fact in one.facts)), None)


class PageWriter:
    """Writes pages. A value may be the name of another thing, which then has a page of its own."""

    def __init__(self, world: World) -> None:
        self._world = world

    def write(self, thing: Thing, attributes: list[Attribute], identity: str, style: Style, others: list[Thing]) -> Page:
        """Return a page that tells these attributes in some order."""
        world, rng, plain = self._world, self._world.rng, style.plain
        named = [other for other in others if other is not thing]
        values = [(attribute, self._value(attribute, named, style.linked)) for attribute in attributes]
        title = _title(rng, thing) if rng.random() < 0.7 else ""
        if not plain and rng.random() < 0.05 * style.noise and all(attribute.label for attribute in attributes):
            return self._table(thing, values, identity, title or thing.name)
        lead = (
            [(LEAD, "")]
            if not (style.bare and style.plain_questions)
            and not thing.kind.is_person
            and rng.random() < (0.4 if plain else 0.5)
            else []
        )
        habit = rng.choice(("pronoun", "noun", "name", "mixed", "mixed"))
        sentences: list[Sentence] = []
        for at, (attribute, value) in enumerate(lead + values):
            by = _subject(rng, habit)
            if at == 0 and not (title and rng.random() < 0.4):
                by = "name"
            said = world.say(thing, attribute, value, by=by, style=style)
            if at == 0 and by == "name" and not said.named:
                sentences.append(
                    Sentence(_upper(rng.choice(("About {}.", "This is {}.", "{}.")).format(thing.name)), (), True)
                )
            if (
                not plain
                and sentences
                and sentences[-1].facts
                and len(sentences[-1].facts) == 1
                and rng.random() < 0.08 * style.noise
            ):
                said = _joined(sentences.pop(), said)
            sentences.append(said)
        text = self._text(sentences, style, others)
        return Page(id=identity, title=title, text=text, thing=thing, sentences=tuple(sentences))

    def _value(self, attribute: Attribute, others: list[Thing], linked: float) -> str:
        """Return a value: with this probability the name of another thing, where one fits."""
        rng = self._world.rng
        if others and rng.random() < linked:
            fitting = [other for other in others if other.kind.names == attribute.value]
            if fitting:
                return rng.choice(fitting).bare
        return self._world.value(attribute)

    def _table(self, thing: Thing, values: list[tuple[Attribute, str]], identity: str, title: str) -> Page:
        """Return a page of lines `Label: value`."""
        bullet = self._world.rng.choice(("", "", "- "))
        lines = [
            Sentence(f"{_upper(attribute.label)}: {value}", ((attribute, value),), False) for attribute, value in values
        ]
        text = "\n".join(bullet + line.text for line in lines)
        return Page(id=identity, title=title, text=text, thing=thing, sentences=tuple(lines))

    def _text(self, sentences: list[Sentence], style: Style, others: list[Thing]) -> str:
        rng = self._world.rng
        parts = [one.text for one in sentences]
        while not style.plain and rng.random() < 0.35 * style.noise:
            parts.insert(rng.randrange(1, len(parts) + 1), self._filler(others))
        if len(parts) > 3 and rng.random() < 0.12 * style.noise:
            at = rng.randrange(1, len(parts))
            return " ".join(parts[:at]) + rng.choice(("\n", "\n\n")) + " ".join(parts[at:])
        return (rng.choice(("\n", "\n- ")) if rng.random() < 0.04 * style.noise else " ").join(parts)

    def _filler(self, others: list[Thing]) -> str:
        """Return a sentence without an answer; sometimes everyday words at random, so that all of them are trained."""
        words, rng = self._world.words, self._world.rng
        way = rng.random()
        if way < 0.2:
            return _upper(words.pick(rng, "mention").format(rng.choice(others).name))
        if way < 0.8:
            return words.pick(rng, "filler")
        lists = ("common", "common", "common", "noun", "adjective", "product", "profession")
        return _upper(" ".join(words.pick(rng, rng.choice(lists)) for _ in range(rng.randrange(4, 10)))) + "."


def page_ids(rng: Random, things: list[Thing], plain: bool) -> list[str]:
    """Return an id for each thing's page, all different, all in one common style of document ids."""
    way = rng.randrange(2 if plain else 12)
    start, seen, ids = rng.randrange(0, 300), set(), []
    for at, thing in enumerate(things):
        slug = thing.bare.lower().replace(" ", "-").replace(".", "")
        number = rng.randrange(1, 1000)
        name = (
            f"d{at + 1}", f"d{number}", f"doc-{number}", f"doc{start + at}", str(start + at), str(number),
            f"{rng.getrandbits(32):08x}", slug, f"{thing.noun.replace(' ', '-')}-{slug}", f"{slug}.md",
            f"{rng.choice(('page', 'src', 'faq', 'note', 'wiki', 'text'))}{rng.choice('-_/#')}{number}",
            f"{rng.choice('ABCDEFGH')}{number}",
        )[way]  # fmt: skip
        while name in seen:
            name += rng.choice(("-2", "b", "x", "-1", "7"))
        seen.add(name)
        ids.append(name)
    return ids


def _title(rng: Random, thing: Thing) -> str:
    pattern = rng.choice(TITLES)
    return pattern.format(N=_upper(thing.bare), n=thing.name, noun=thing.noun, b=thing.bare)


def _subject(rng: Random, habit: str) -> str:
    if habit == "mixed":
        return rng.choice(("name", "pronoun", "pronoun", "noun"))
    return habit if rng.random() < 0.85 else "name"


def _joined(left: Sentence, right: Sentence) -> Sentence:
    """Join two sentences."""
    first, rest = right.text.split(" ", 1)
    first = first.lower() if first in SMALL else first
    return Sentence(f"{left.text[:-1]}, and {first} {rest}", left.facts + right.facts, left.named or right.named)


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
