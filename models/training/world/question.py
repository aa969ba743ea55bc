"""Wordings of questions: in full, in keywords, by the value, in lower case, or as a follow-up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .chain import Chain
from .page import Page
from .wording import LABEL_AGAIN, LABEL_ASK, NAME_AGAIN, PLAIN_ASK, WRAPPED, Attribute, Style
from .world import VOWELS, Thing, with_article

_INDIRECT = re.compile(r"(What|Who|Where|When) (is|was) (the .*)\?")
_OBJECT = re.compile(r"\b(of|to|about|with|for|by|from|at|in|on|find|call|reach|visit|say about) \{n\}")

_SMALL = frozenset(
    (
        "What",
        "Who",
        "Whose",
        "Whom",
        "When",
        "Where",
        "Which",
        "How",
        "Why",
        "In",
        "On",
        "At",
        "From",
        "With",
        "Over",
        "Near",
        "By",
        "Under",
        "Since",
        "Until",
        "Tell",
        "Do",
        "The",
        "Please",
        "Can",
    )
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A question: its text, its thing and its attribute."""

    text: str
    thing: Thing
    attribute: Attribute


class Asker:
    """Words questions about the things of one conversation."""

    def __init__(self, rng: Random, style: Style) -> None:
        self._rng, self._style = rng, style

    def full(self, thing: Thing, attribute: Attribute, others: Sequence[Thing]) -> Asked:
        """Return a question that is unambiguous among these other things."""
        rng = self._rng
        if self._style.plain_questions:
            asks = PLAIN_ASK[: 1 if self._style.bare else 2] if attribute.label else attribute.ask
            return Asked(self._fill(rng.choice(asks), attribute, _forms(thing.name)), thing, attribute)
        name = self._reference(thing, others)
        text = self._fill(self._template(attribute), attribute, _forms(name))
        return Asked(self._as_typed(text), thing, attribute)

    def joined(self, chain: Chain, attribute: Attribute) -> Asked:
        """Return a question about a thing that another document names."""
        text = self._fill(self._template(attribute), attribute, _forms(chain.name))
        return Asked(self._as_typed(text), chain.named, attribute)

    def backwards(self, page: Page, attribute: Attribute, value: str) -> Asked:
        """Return a question that names the value and asks for the thing."""
        text = self._rng.choice(attribute.back).replace("{noun}", page.thing.noun)
        if value.startswith(VOWELS):
            text = text.replace("a {v}", "an {v}")
        return Asked(self._as_typed(text.replace("{v}", value)), page.thing, attribute)

    def next_attribute(self, thing: Thing, attribute: Attribute) -> Asked:
        """Return a follow-up about another attribute of the same thing."""
        rng = self._rng
        if attribute.label and rng.random() < 0.5:
            text = rng.choice(LABEL_AGAIN).replace("{its}", thing.pronouns[1]).replace("{label}", attribute.label)
            return Asked(self._as_typed(text, wrap=0.0), thing, attribute)
        template = _OBJECT.sub(r"\1 {o}", self._template(attribute))
        text = self._fill(template, attribute, thing.pronouns)
        if rng.random() < 0.4 and text.split()[0] in (
            "Who",
            "What",
            "Where",
            "When",
            "How",
            "Which",
            "Whose",
            "In",
            "At",
            "On",
        ):
            text = f"And {_lower(text)}"
        return Asked(self._as_typed(text), thing, attribute)

    def next_thing(self, thing: Thing, attribute: Attribute) -> Asked:
        """Return a follow-up about the same attribute of another thing."""
        text = self._rng.choice(NAME_AGAIN).replace("{n}", thing.name)
        return Asked(self._as_typed(text, wrap=0.0), thing, attribute)

    def _template(self, attribute: Attribute) -> str:
        rng = self._rng
        return rng.choice(
            LABEL_ASK if attribute.label and rng.random() < 0.25 * min(1.0, self._style.noise + 0.4) else attribute.ask
        )

    def _fill(self, template: str, attribute: Attribute, forms: tuple[str, str, str]) -> str:
        """Fill in a template. forms: the thing as a subject, a possessor and an object."""
        subject, possessor, other = forms
        text = template.replace("{label}", attribute.label)
        if attribute.label.startswith(VOWELS):
            text = text.replace(" a " + attribute.label, " " + with_article(attribute.label))
        return _upper(text.replace("{ns}", possessor).replace("{n}", subject).replace("{o}", other))

    def _reference(self, thing: Thing, others: Sequence[Thing]) -> str:
        """Return the name; sometimes a part of it, or `the museum` if only one thing has this noun."""
        rng = self._rng
        way, parts = rng.random(), thing.bare.split()
        if thing.kind.is_person and way < 0.2 and len(parts) > 1:
            part = parts[-1] if rng.random() < 0.5 or parts[0].endswith((".", "r")) else parts[0]
            if not any(part.lower() in other.bare.lower() for other in others if other is not thing):
                return part
        if (
            not thing.kind.is_person
            and way < 0.12
            and not any(other.noun == thing.noun for other in others if other is not thing)
        ):
            return f"the {thing.noun}"
        if way > 0.95:
            return thing.bare
        return thing.name

    def typed(self, text: str) -> str:
        """Return a question as people type it."""
        return self._as_typed(text)

    def _as_typed(self, text: str, wrap: float = 0.1) -> str:
        rng, noise = self._rng, self._style.noise
        if rng.random() < 0.05 * noise and (match := _INDIRECT.fullmatch(text)) and "called" not in text:
            word, verb, rest = match.groups()
            start = rng.choice(("Can you tell me", "Could you tell me", "Do you know"))
            text = f"{start} {word.lower()} {rest} {verb}?"
        elif rng.random() < wrap * noise:
            text = rng.choice(WRAPPED).replace("{q}", _lower(text)).replace("{Q}", text)
        if rng.random() < 0.04 * noise:
            text = _with_typo(rng, text)
        if rng.random() < 0.08 * noise:
            text = text.lower()
        if rng.random() < 0.08 * noise:
            text = text.rstrip("?.")
        return text


def _with_typo(rng: Random, text: str) -> str:
    """Swap two letters of a lower-case word, or drop one."""
    words = text.split(" ")
    places = [at for at, word in enumerate(words) if word.islower() and len(word) > 4 and word.isalpha()]
    if places:
        at = rng.choice(places)
        word, letter = words[at], rng.randrange(1, len(words[at]) - 1)
        swapped = word[:letter] + word[letter + 1] + word[letter] + word[letter + 2 :]
        words[at] = swapped if rng.random() < 0.5 else word[:letter] + word[letter + 1 :]
    return " ".join(words)


def _forms(name: str) -> tuple[str, str, str]:
    """Return a name as a subject, a possessor and an object."""
    return name, _possessive(name), name


def _possessive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lower(text: str) -> str:
    """Return the text with a small first letter if it begins with a question word; a name keeps its capital."""
    first = text.split(" ", 1)[0].rstrip(",")
    return text[:1].lower() + text[1:] if first in _SMALL else text
