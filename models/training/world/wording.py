"""The wordings of wording.toml, and general wordings by an attribute's label."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

PLAIN_SAY = ("The {label} is {v}.", "{Its} {label} is {v}.", "The {label} of {n} is {v}.")
PLAIN_ASK = ("What is the {label} of {n}?", "What is {ns} {label}?")
LABEL_ASK = (
    *PLAIN_ASK,
    "{n}: {label}?",
    "{label} of {n}",
    "{n} {label}",
    "{ns} {label}?",
    "Tell me the {label} of {n}.",
    "Tell me {ns} {label}.",
    "Do you know the {label} of {n}?",
    "Can you tell me what the {label} of {n} is?",
    "I would like to know the {label} of {n}.",
    "Which {label} does {n} have?",
    "What {label} does {n} have?",
    "Please give me the {label} of {n}.",
    "What do the documents say about the {label} of {n}?",
)
LABEL_AGAIN = (
    "And the {label}?",
    "And {its} {label}?",
    "What about the {label}?",
    "What about {its} {label}?",
    "The {label}?",
)
NAME_AGAIN = ("And {n}?", "What about {n}?", "How about {n}?", "The same for {n}?", "And for {n}?", "And what about {n}?")
LEAD_SAY = ("{N} is {a_noun}.", "{N} is {a_adjective} {noun}.", "This is about {n}, {a_adjective} {noun}.")
LEAD_ASK = ("What is {n}?", "Tell me about {n}.", "What kind of thing is {n}?", "What can you say about {n}?", "{n}?")
WRAPPED = (
    "Please tell me: {q}", "A question: {q}", "Hello, {q}", "Excuse me, {q}", "According to the documents, {q}", "Hi! {Q}",
    "{Q} Please be brief.", "{Q} Thank you.", "So {q}", "I have a question. {Q}", "Do you know this: {q}", "Thanks. {Q}",
    "Now tell me, {q}", "Good. {Q}", "{Q} I need to know.", "I was wondering, {q}",
)  # fmt: skip
SMALL_TALK = (
    ("Hello", "Hello. What would you like to know?"), ("Hi!", "Hello. What would you like to know?"),
    ("Good morning", "Hello. What would you like to know?"), ("Hello!", "Hello. What would you like to know?"),
    ("Thank you.", "You are welcome."), ("Thanks!", "You are welcome."), ("Thank you very much!", "You are welcome."),
    ("thanks", "You are welcome."), ("Who are you?", "I answer questions about your documents."),
    ("What can you do?", "I answer questions about your documents."), ("Goodbye", "Goodbye."), ("Bye!", "Goodbye."),
)  # fmt: skip
UNKNOWN = "The documents do not say."


@dataclass(frozen=True, slots=True)
class Style:
    """The wording of a conversation; the fields are those of a Recipe."""

    plain: bool
    plain_questions: bool
    bare: bool
    wordings: int
    noise: float
    linked: float


@dataclass(frozen=True, slots=True)
class Attribute:
    """A property of a thing. value: the sort of its value. say, ask, back: templates of sentences and questions."""

    label: str
    value: str
    say: tuple[str, ...]
    ask: tuple[str, ...]
    back: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing. names: the sort of its names. article: whether they take `the`."""

    nouns: tuple[str, ...]
    names: str
    is_person: bool
    article: bool
    attributes: tuple[Attribute, ...]


def load_kinds() -> dict[str, Kind]:
    """Return all kinds by name, from the file beside this module."""
    tables = tomllib.loads(Path(__file__).with_name("wording.toml").read_text(encoding="utf-8"))
    return {name: _kind(table) for name, table in tables.items()}


def _kind(table: dict) -> Kind:
    attributes = tuple(
        Attribute(
            label=row.get("label", name.replace("_", " ")),
            value=row["value"],
            say=tuple(row["say"]),
            ask=tuple(row["ask"]),
            back=tuple(row.get("back", ())),
        )
        for name, row in table.items()
        if isinstance(row, dict)
    )
    is_person = table["pronoun"] == "person"
    return Kind(
        nouns=tuple(table["nouns"]),
        names=table["names"],
        is_person=is_person,
        article=table.get("article", False),
        attributes=attributes,
    )
