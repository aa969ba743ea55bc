"""The names of an answer's headers, spelt as llama-server spells them: `Content-Type`.

Case means nothing in them, but scripts that search an answer's head know one spelling only.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Spelling:
    """Begins each word of a header's name with a capital letter."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def spell_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(name.title(), value) for name, value in message["headers"]]
            await send(message)

        await self._app(scope, receive, spell_and_send)
