"""Check that a server reused as many documents as the orders that it served before allow."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..ordering.arrangement import arrange
from ..ordering.policy import ORACLE_LIMIT
from ..ordering.tree import KnowledgeTree
from .comparison import reused
from .drive import Run


@dataclass(frozen=True, slots=True)
class Prediction:
    """For one query: the number of documents that could be reused, and the documents that the server reused."""

    index: int
    predicted: int
    reported: int
    order: tuple[str, ...]

    def text(self) -> str:
        """Return one line about the query."""
        return f"query {self.index}: predicted {self.predicted}, reported {self.reported}, used {', '.join(self.order)}"


def predictions(run: Run) -> Iterator[Prediction]:
    """Compare an exhaustive search over a trie of all earlier orders with the server's report, query by query.

    For a trace that was sent one query at a time. The trie holds the orders that the server reported. If the search finds
    more than the report, KV was evicted in between; if it finds less, one of the two is wrong. Queries whose result names no
    documents are left out.
    """
    tree = KnowledgeTree(max_nodes=max(1, sum(len(query.documents) for query in run.queries)))
    for index, (query, result) in enumerate(zip(run.queries, run.results, strict=True)):
        if not result.documents:
            continue
        keys = [name for name, _ in query.documents]
        # Both are exact. The oracle tries every order, so it is limited to a few documents.
        policy = "oracle" if len(keys) <= ORACLE_LIMIT else "auto"
        predicted = arrange(keys, tree, policy).reused_documents
        tree.insert([(used.id, used.tokens) for used in result.documents])
        yield Prediction(index, predicted, reused(query, result), tuple(used.id for used in result.documents))


def differences(run: Run, more_is_right: bool = False) -> tuple[list[Prediction], int]:
    """Return the queries whose prediction and report differ, and the number of queries compared.

    more_is_right: the server prefills documents in idle time, so it may hold more than it has used.
    """
    compared = list(predictions(run))
    found = [one for one in compared if one.predicted != one.reported]
    return [one for one in found if one.reported < one.predicted or not more_is_right], len(compared)
