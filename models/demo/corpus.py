"""The bundled corpus: documents about an invented region, and questions with answers and retrieved documents."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("corpus.json")
SUGGESTED = (
    "Which river does Tarnwick lie on?",
    "When is the Tarnwick Hat Fair?",
    "When is the Museum of Hats closed?",
)
"""Questions for a first try."""


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """A document of about 30 words on one subject."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    """A question about the corpus.

    answer: a sentence of `document`.
    ranked: the ids of five documents, ranked by a keyword search.
    """

    question: str
    answer: str
    document: str
    ranked: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Corpus:
    documents: dict[str, CorpusDocument]
    """By id."""
    questions: tuple[CorpusQuestion, ...]

    @classmethod
    def load(cls) -> Corpus:
        """Read the file beside this module."""
        content = json.loads(FILE.read_text(encoding="utf-8"))
        documents = [CorpusDocument(**row) for row in content["documents"]]
        questions = [CorpusQuestion(**row | {"ranked": tuple(row["ranked"])}) for row in content["questions"]]
        return cls({document.id: document for document in documents}, tuple(questions))

    def write(self, folder: Path) -> Path:
        """Write each document to a file in a folder, unless the file has this text. Return the folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for document in self.documents.values():
            file, text = folder / f"{document.id}.md", f"# {document.title}\n\n{document.text}\n"
            if not file.exists() or file.read_text("utf-8") != text:
                file.write_text(text, "utf-8")
        return folder
