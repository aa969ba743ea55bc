"""Documents in freer wording than the bundled corpus, and questions that measure the embedded model on them.

Each sentence tells one or two facts, most of them with pronouns. They were written before the model saw wording of this
kind; training knows neither their sentences nor their names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .corpus import CorpusDocument

FILE = Path(__file__).with_name("freer.json")
LONGEST = 30
"""Words of an answer: more than any sentence of the documents has, and fewer than two sentences."""


@dataclass(frozen=True, slots=True)
class FreerQuestion:
    """A question. answers: spellings of the one right answer. shown: ids of five documents, `document` among them."""

    question: str
    answers: tuple[str, ...]
    document: str
    shown: tuple[str, ...]

    def is_answered_by(self, text: str) -> bool:
        """Return whether the text holds the right answer, in a sentence rather than a whole document."""
        return len(text.split()) <= LONGEST and any(answer.lower() in text.lower() for answer in self.answers)


@dataclass(frozen=True, slots=True)
class FreerCorpus:
    documents: dict[str, CorpusDocument]
    """By id."""
    questions: tuple[FreerQuestion, ...]

    @classmethod
    def load(cls) -> FreerCorpus:
        """Read the file beside this module."""
        content = json.loads(FILE.read_text(encoding="utf-8"))
        documents = [CorpusDocument(**row) for row in content["documents"]]
        questions = [
            FreerQuestion(row["question"], tuple(row["answers"]), row["document"], tuple(row["shown"]))
            for row in content["questions"]
        ]
        return cls({document.id: document for document in documents}, tuple(questions))
