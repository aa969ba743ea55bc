"""Three invented manuals as parts: a long one, one with lists and code, and one that is a single chunk."""

from __future__ import annotations

from random import Random

from support.office import Part

NOUNS = """harbour signal lantern keeper tide chart vessel anchor pilot current compass beacon channel mooring cargo ledger
winter storm repair engine valve pressure gauge pump boiler station record morning report captain weather window ladder
bridge copper cable battery circuit switch relay meter panel garden orchard cellar barrel vinegar honey flour kettle
recipe basket market village council letter stamp archive museum painting frame marble quarry tunnel railway platform
ticket whistle carriage journey valley river forest meadow mountain glacier summit shelter rope boot tent stove"""
LINKING = ("the", "a", "of", "in", "to", "with", "under", "before", "after", "between", "every")


def sentences(random: Random, count: int) -> str:
    return " ".join(_sentence(random) for _ in range(count))


def _sentence(random: Random) -> str:
    nouns = NOUNS.split()
    words = [random.choice(LINKING if at % 2 else nouns) for at in range(random.randint(7, 17))]
    return " ".join(words).capitalize() + "."


def title(random: Random) -> str:
    return " ".join(random.sample(NOUNS.split(), random.randint(2, 3))).capitalize()


def section(random: Random, kind: str, paragraphs: int) -> list[Part]:
    parts = [Part("p", sentences(random, random.randint(3, 6))) for _ in range(paragraphs)]
    return [Part(kind, title(random)), *parts]


def handbook() -> list[Part]:
    """Eight pages: a section of 25 paragraphs among small and middling ones, and a paragraph longer than a chunk."""
    random = Random(1)
    parts = [Part("h1", "Harbour handbook"), Part("p", sentences(random, 3))]
    for paragraphs in (2, 25, 1, 1, 7):
        parts += section(random, "h2", paragraphs)
        parts += section(random, "h3", 2) + section(random, "h3", 4)
    return [*parts, Part("h2", "A long paragraph"), Part("p", sentences(random, 60))]


def guide() -> list[Part]:
    random = Random(2)
    parts = [Part("h1", "Signal guide")]
    for number in range(6):
        parts += section(random, "h2", 3)
        parts += [Part("li", sentences(random, 1)) for _ in range(4)]
        code = "\n".join(f"{'    ' * (line % 2)}set_{random.choice(NOUNS.split())}({number}, {line})" for line in range(6))
        parts += [Part("p", sentences(random, 2)), Part("code", code), Part("p", sentences(random, 4))]
    return parts


def note() -> list[Part]:
    random = Random(3)
    return [Part("h1", "Visitors"), *section(random, "h2", 2), *section(random, "h2", 2)]


MANUALS = {"handbook": handbook(), "guide": guide(), "note": note()}
