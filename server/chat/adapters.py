"""The LoRA adapters as requests set them."""

from __future__ import annotations

from collections.abc import Sequence

from ...models.lora import Adapters
from ..http.api_errors import RequestError
from .body import AdapterScale


class Lora:
    """The adapters, and the usual scales: those of a request that sets none. It belongs to the event loop."""

    def __init__(self, adapters: Adapters, scales: Sequence[float]) -> None:
        self._adapters, self._scales = adapters, dict(enumerate(scales))

    def name(self, asked: Sequence[AdapterScale] | None) -> str:
        """Return the name of the set that a request asks for; None: the usual one. Raises RequestError."""
        return self._adapters.name(self._scales if asked is None else self._read(asked, "lora"))

    def change(self, asked: Sequence[AdapterScale]) -> None:
        """Change the usual scales; an adapter that is not named gets 0. Raises RequestError."""
        self._scales = dict.fromkeys(self._scales, 0.0) | self._read(asked, "adapters")

    def shown(self) -> list[dict[str, object]]:
        """Return the adapters with the usual scales, as llama-server shows them."""
        return [
            {"id": number, "path": str(path), "scale": self._scales[number], "task_name": "", "prompt_prefix": ""}
            for number, path in enumerate(self._adapters.paths)
        ]

    def _read(self, asked: Sequence[AdapterScale], where: str) -> dict[int, float]:
        for at, one in enumerate(asked):
            if one.id not in self._scales:
                known = f"0 to {len(self._scales) - 1}" if self._scales else "no entry, since --lora names no adapter"
                raise RequestError(f"{where}[{at}].id is {one.id}: expected {known}", param=f"{where}[{at}].id")
        return {one.id: one.scale for one in asked}
