"""Random clients of a server: chats, raw prompts, edits, disconnects, restarts. Each act can be stored in a file."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from support.chat_wishes import PAGES, QUESTIONS

Act = dict[str, Any]
CHAT, RAW, TEXT, WARM = "/v1/chat/completions", "/completion", "/v1/completions", "/v1/cache/warm"
CANNED = ("Zounds, as the page says.", "Quite so.", "Vexing: no page says that.")  # no model starts an answer like these
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LONGEST = 4000  # most characters of a chat's messages
LONG_PAGES = [replace(page, id=f"{page.id}-all", text=" ".join(one.text for one in PAGES[:4])) for page in PAGES[:2]]
SCOPES = ["", "", "", "x", "y"]


@dataclass
class Talk:
    """A chat as its client knows it. fields: the fields of each of its requests."""

    scope: str
    fields: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_separate(self) -> bool:
        return "documents_attention" in self.fields

    @property
    def length(self) -> int:
        pages = (page for message in self.messages for page in message.get("documents", ()))
        return sum(len(one["content"]) for one in self.messages) + sum(len(page["text"]) for page in pages)


class Clients:
    """Draws acts. alone: one request at a time, never after a real answer, and a disconnect is at a known event."""

    def __init__(self, rng: Random, *, alone: bool, can_move: bool) -> None:
        self._rng, self._alone, self._can_move = rng, alone, can_move
        self._talks: list[Talk] = []
        self._texts: list[str] = []
        self._num_talks = 0
        self._asked: list[tuple[Talk | None, dict[str, Any]]] = []  # the last act's requests

    def act(self) -> Act:
        """Return the next act."""
        chance, rng = self._rng.random(), self._rng
        self._asked = []
        if chance < 0.05:
            return {"do": "drop", "scope": rng.choice([talk.scope for talk in self._talks[-4:]] or SCOPES)}
        if chance < 0.13:
            return {"do": "kill", "requests": self._requests(most=2), "after": rng.choice([0, 1, 2, 4, 9])}
        if chance < 0.2:
            return {"do": "stop"}
        return {"do": "ask", "requests": self._requests(most=4 if rng.random() < 0.4 else 1)}

    def hear(self, texts: list[str | None]) -> None:
        """Continue the chats from the answers to the last act. None: there is no complete answer."""
        for (talk, _), text in zip(self._asked, texts, strict=True):
            if talk is not None and talk.messages[-1]["role"] != "assistant":
                canned = self._rng.choice(CANNED)  # always drawn, so that later acts do not depend on answers
                is_heard = text and not (self._alone or talk.is_separate)
                talk.messages.append({"role": "assistant", "content": text if is_heard else canned})

    def _requests(self, most: int) -> list[dict[str, Any]]:
        """Return requests of different chats, to send at the same time."""
        found: dict[int, tuple[Talk | None, dict[str, Any]]] = {}
        for _ in range(1 if self._alone else self._rng.randint(1, most)):
            talk = None if self._rng.random() < 0.2 else self._talk()
            if talk is None or id(talk) not in found:
                found[id(talk) if talk else -len(found)] = (talk, self._chat(talk) if talk else self._raw())
        self._asked = list(found.values())
        return [request for _, request in self._asked]

    def _talk(self) -> Talk:
        """Return a chat to continue, or a new chat."""
        rng = self._rng
        if self._talks and rng.random() < 0.85:
            talk = self._talks[-min(rng.choice([1, 1, 2, 3, 4]), len(self._talks))]
            if talk.length < LONGEST:
                return talk
        self._num_talks += 1
        fields: dict[str, Any] = {"tools": [TOOL]} if rng.random() < 0.3 else {}
        if self._can_move and rng.random() < 0.3:
            fields["documents_attention"] = "separate"
        elif not self._alone and rng.random() < 0.4:
            fields["conversation"] = {"id": f"talk {self._num_talks}", "history": "whole"}
        talk = Talk(rng.choice(SCOPES), fields)
        if rng.random() < 0.5:
            talk.messages.append({"role": "system", "content": "Answer from the documents."})
        self._talks.append(talk)
        return talk

    def _chat(self, talk: Talk) -> dict[str, Any]:
        """Return the next request of a chat, which may change earlier messages."""
        rng, messages = self._rng, talk.messages
        how = rng.choice(["turn", "turn", "turn", "again", "edit", "take back", "tool"])
        answered = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        if how == "again" and answered:
            del messages[answered[-1] :]
        elif how == "take back" and answered:
            del messages[next((at for at in reversed(range(len(messages))) if messages[at]["role"] == "user"), 0) :]
        elif how == "edit" and answered:
            at = rng.choice([at for at, one in enumerate(messages) if one["role"] == "user"])
            messages[at] = messages[at] | {"content": rng.choice(QUESTIONS)}
            del messages[answered[-1] :]
        elif how == "tool" and answered and "tools" in talk.fields and not messages[-1].get("tool_calls"):
            name = f"call{len(messages)}"
            call = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages[-1] = messages[-1] | {"tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": name, "content": rng.choice(PAGES).text}
            messages.append(result | ({"documents": self._pages()} if rng.random() < 0.5 else {}))
        if not messages or messages[-1]["role"] in ("assistant", "system"):
            pages = {"documents": self._pages()} if rng.random() < 0.7 else {}
            messages.append({"role": "user", "content": rng.choice(QUESTIONS)} | pages)
        path = WARM if rng.random() < 0.05 else CHAT
        return self._request(path, {"messages": list(messages), "cache_scope": talk.scope} | talk.fields)

    def _pages(self) -> list[dict[str, str]]:
        pages = self._rng.sample(PAGES[:10] + LONG_PAGES, self._rng.randint(1, 3))
        return [{"id": page.id, "text": page.text, "title": page.title} for page in pages]

    def _raw(self) -> dict[str, Any]:
        """Return a prompt of text or ids: a new prompt, an earlier prompt, or a longer form of one."""
        rng = self._rng
        text = rng.choice(self._texts) if self._texts and rng.random() < 0.8 else rng.choice(PAGES[:10]).text
        if rng.random() < 0.5 and len(text) < LONGEST:
            text += " " + rng.choice(PAGES[:10]).text
        self._texts.append(text)
        ids = [*text[:200].encode()]  # valid ids in any model
        prompt = rng.choice([text, text, ids, [*ids[:60], text]])
        return self._request(rng.choice([RAW, TEXT]), {"prompt": prompt, "cache_scope": rng.choice(["", "", "x"])})

    def _request(self, path: str, about: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": rng.choice([1, 4, 10, 20]), "cache_prompt": True}
        body |= about
        if rng.random() < 0.07:
            body["cache_prompt"] = False
        if not self._alone and rng.random() < 0.2:
            body |= {"n": rng.randint(2, 3)} if path != WARM else {}
        if not self._alone and rng.random() < 0.2:
            body["priority"] = 1
        disconnect_after = None
        if path != WARM and rng.random() < 0.5:
            body["stream"] = True
            if rng.random() < 0.35:  # disconnect after so many events, the first of which is the start of the prompt
                disconnect_after = rng.choice([1, 2, 3, 6, 9] if self._alone else [0, 0, 1, 2, 3, 6, 9])
                body |= {"max_tokens": 40, "return_progress": True}
        return {"path": path, "body": body, "leave": disconnect_after}
