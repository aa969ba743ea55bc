"""Computes right answers from the ids of prompts, on a server without a cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from server.conftest import Running, running
from slotcache.models.demo import FILE
from slotcache.server.engine.generation import Generation

Ids = tuple[int, ...]
SAMPLING = ("temperature", "seed", "stop", "ignore_eos", "logit_bias")
CONTROL = "<|im_start|><|im_end|><|endoftext|>"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. ids: the sampled ids, without the end token. spells: whether they spell exactly the text."""

    text: str
    reason: str
    num_tokens: int
    ids: Ids
    spells: bool


class Reference:
    """Answers prompts one at a time, without any cache."""

    def __init__(self, server: Running) -> None:
        self._http = server.http
        self._seen: list[Generation] = []
        self.cut = cache(self._cut)
        self.control = set(self.cut(CONTROL, True))
        door = server.service.engine
        submit = door.submit

        def listen(generations: Sequence[Generation]) -> None:
            self._seen += generations
            submit(generations)

        door.submit = listen  # no route reports the ids of an answer

    def answer(self, prompt: Ids, options: Mapping[str, Any]) -> Reply:
        """Return the answer to these ids."""
        body = {"prompt": list(prompt), "n_predict": options["max_tokens"], "cache_prompt": False}
        body |= {name: options[name] for name in SAMPLING if name in options}
        said = self._post("/completion", body)
        job = self._seen.pop().job
        assert said["slotcache"]["cached_tokens"] == 0 and said["usage"]["prompt_tokens"] == len(prompt)
        ids = tuple(job.tokens[job.num_prompt : job.num_tokens].tolist())
        reason = {"limit": "length", "eos": "stop", "word": "stop"}[said["stop_type"]]
        if reason == "stop" and ids and ids[-1] in self.control:
            ids = ids[:-1]
        plain = not self.control.intersection(ids)
        spells = plain and self._post("/detokenize", {"tokens": list(ids)})["content"] == said["content"] != ""
        return Reply(said["content"], reason, said["usage"]["completion_tokens"], ids, spells)

    def _cut(self, text: str, special: bool) -> Ids:
        return tuple(self._post("/tokenize", {"content": text, "parse_special": special})["tokens"])

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def reference() -> Iterator[Reference]:
    """Yield a reference with the embedded model, whose results are bit-equal."""
    with running(FILE, ctx_size=4096, cache_ram=0) as server:
        yield Reference(server)
