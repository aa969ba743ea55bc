"""A prompt without documents to arrange, for tests of the layers below the server."""

import numpy as np


class Fixed:
    """Satisfies `slots.request.Prompt`: `tokens` with nodes ending at `stops`."""

    def __init__(self, tokens, stops=(), documents=(), breakpoints=()):
        from slotcache.slots.request import Layout

        self.layout = Layout(np.asarray(tokens, np.int32), tuple(stops), tuple(documents), breakpoints=tuple(breakpoints))
        self.num_tokens = len(self.layout.tokens)
        self.beginning = self.layout.tokens
        self.documents: frozenset[str] = frozenset()

    def arrange(self, tree, scope, waiting=()):
        return self.layout
