"""Whether a server reused as many documents as the orders it served before allow."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..ordering.arrangement import arrange
from ..ordering.policy import ORACLE_LIMIT
from ..ordering.tree import KnowledgeTree
from .comparison import reused
from .drive import Run


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one query: the documents that could be reused, and those the server says it reused."""

    index: int
    predicted: int
    reported: int
    order: tuple[str, ...]

    def text(self) -> str:
        """One line that names the query."""
        return f"query {self.index}: predicted {self.predicted}, reported {self.reported}, used {', '.join(self.order)}"


def predictions(run: Run) -> Iterator[Prediction]:
    """An exhaustive search over a trie of all earlier orders, against what the server reports, query by query.

    Of a trace that was sent one at a time: the trie holds the orders the server says it used. Where it predicts more
    than is reported, KV was evicted meanwhile; where it predicts less, one of the two is wrong. Queries whose result
    names no documents are left out.
    """
    tree = KnowledgeTree(max_nodes=max(1, sum(len(query.documents) for query in run.queries)))
    for index, (query, result) in enumerate(zip(run.queries, run.results, strict=True)):
        if not result.documents:
            continue
        keys = [name for name, _ in query.documents]
        # The two are exact alike; the oracle tries every order and so is limited to a few documents.
        policy = "oracle" if len(keys) <= ORACLE_LIMIT else "auto"
        predicted = arrange(keys, tree, policy).reused_documents
        tree.insert([(used.id, used.tokens) for used in result.documents])
        yield Prediction(index, predicted, reused(query, result), tuple(used.id for used in result.documents))


def differences(run: Run, more_is_right: bool = False) -> tuple[list[Prediction], int]:
    """The queries where prediction and report differ, and how many were compared.

    more_is_right: of a server that computes documents ahead, so that it holds more than it has used.
    """
    compared = list(predictions(run))
    found = [one for one in compared if one.predicted != one.reported]
    return [one for one in found if one.reported < one.predicted or not more_is_right], len(compared)
