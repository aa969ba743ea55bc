"""The properties of the conversations that are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """The properties of conversations. Ranges include both ends; shares are from 0 to 1."""

    documents: tuple[int, int] = (1, 10)
    """Of the first turn."""
    turns: tuple[int, int] = (1, 6)
    plain: bool = False
    """Documents only in the simplest wording: attribute, then value."""
    plain_questions: bool = False
    bare: bool = False
    """Only the form `The river of Velmora is Oskel.`: each sentence names its subject."""
    kinds: tuple[str, ...] = ()
    """The kinds of things; () for all in wording.toml."""
    told: tuple[int, int] = (3, 6)
    """Attributes a document."""
    wordings: int = 0
    """The number of sentences for an attribute, those first that do not begin with the value; 0 for all."""
    made_up: float = 1.0
    """Share of conversations with made-up attributes."""
    noise: float = 1.0
    """Amount of filler, typing mistakes and other noise."""
    unknown: float = 0.15
    """Share of questions that no document answers."""
    joined: float = 0.0
    """Share of questions that need two documents, where one names the thing of another."""
    linked: float = 0.15
    """Share of values that are the name of another thing with a document of its own, where one fits."""
    later: float = 0.5
    """Share of later turns with documents of their own."""
    repeat: float = 0.5
    """The share of later questions with documents that repeats documents of earlier turns."""
    located: float = 0.5
    """The share of repeated documents that a question points to instead of showing them again."""
    hinted: float = 0.3
    """Share of document sets with an order hint."""
    follow: float = 0.4
    """Share of later questions that refer to the question before."""
    aside: float = 0.03
    """Share of conversations with small talk."""
    system: float = 0.15
    """Share of conversations with a system message."""
    freer: bool = False
    """Documents in freer wording, see freer.py; kinds, told and the like do not count then."""
