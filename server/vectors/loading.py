"""Makes the embedder and the reranker that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...models.embedding import Embedder, EmbedderSettings
from ...models.errors import ModelError
from ...models.hardware.cores import fast_cores
from ...models.model import Model
from ..chat.texts import Texts
from ..chat.threads import PromptThreads
from ..edge.bodies import LARGEST
from ..settings import Settings
from .queue import VectorQueue
from .vectors import Computer, Vectors

TEXTS_ON_GPU = 64  # of a call; on a CPU, each text has its own


def load_vectors(settings: Settings, model: Model, name: str, is_busy: Callable[[], bool]) -> Vectors:
    """Load the models beside, and make the contexts. Raises ModelError.

    model, name: the served model, which may be one of these. is_busy: as in `VectorQueue`.
    """
    reranks = settings.reranking or (settings.embeddings and settings.pooling == "rank")
    embeds = settings.embeddings and not reranks
    loader = _Loader(settings, model, name, is_busy)
    return Vectors(
        settings=settings,
        model=model,
        name=name,
        texts=Texts(model),
        embedding=loader.load(settings.embedding_model, embeds, settings.pooling),
        reranking=loader.load(settings.rerank_model, reranks, "rank"),
        threads=PromptThreads(LARGEST * settings.max_body << 20),
        beside=loader.beside,
    )


@dataclass(slots=True)
class _Loader:
    settings: Settings
    model: Model
    name: str
    is_busy: Callable[[], bool]
    beside: list[Model] = field(default_factory=list)

    def load(self, file: str, is_served: bool, pooling: str) -> Computer | None:
        """Make the computer of one kind: of a model beside, or of the served one; None: of neither."""
        if file and is_served:
            raise ModelError(f"{file} beside {self.model.path}, or that model itself: choose one of the two")
        if is_served:
            return self._computer(self.model, self.name, pooling)
        if not file:
            return None
        path = Path(file).expanduser()
        self.beside.append(
            Model(
                path, self.settings.gpu_layers, repack=self.settings.repack == "on", may_rest=self.settings.sleep_after > 0
            )
        )
        return self._computer(self.beside[-1], path.stem, pooling)

    def _computer(self, model: Model, name: str, pooling: str) -> Computer:
        kind = model.pooling
        if pooling == "rank" and kind not in ("", "none", "rank"):
            raise ModelError(f"{model.path} is no reranker: it pools the vectors of a text by {kind}, not by rank")
        settings = EmbedderSettings(
            pooling=pooling,
            max_tokens=self.settings.ubatch_size,
            flash_attention=self.settings.flash_attn,
            threads=self.settings.threads or fast_cores(),
            most_texts=TEXTS_ON_GPU if model.device else 1,
        )
        embedder = Embedder(model, settings)
        return Computer(
            name, embedder, VectorQueue(embedder, self.is_busy, self.settings.sleep_after), self.settings.max_queue + 1
        )
