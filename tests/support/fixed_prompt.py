"""A prompt without documents to arrange, for tests of the layers below the server."""

import numpy as np


class Fixed:
    """A `slots.request.Prompt` of `tokens`, whose nodes in the tree end at `stops`."""

    def __init__(self, tokens, stops=(), documents=(), breakpoints=(), opening=0):
        from slotcache.slots.request import Layout

        tokens, places, breakpoints = np.array(tokens, np.int32), (tuple(stops), tuple(documents)), tuple(breakpoints)
        self.layout = Layout(tokens, *places, breakpoints=breakpoints, opening=opening)
        self.num_tokens = len(self.layout.tokens)
        self.prefix = self.layout.tokens
        self.documents: frozenset[str] = frozenset()

    def arrange(self, tree, scope, waiting=()):
        return self.layout
