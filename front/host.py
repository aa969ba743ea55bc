"""All that serves while the front is up."""

from __future__ import annotations

from dataclasses import dataclass

from ..server.edge.bodies import Bodies
from ..server.settings import Settings
from .counting import Counting
from .engines import Finder
from .learning import Learning
from .lengths import Lengths
from .metrics import Metrics
from .orders import Orders
from .settings import Front
from .upstream import Upstream

COUNTED = 4  # times as many documents whose tokens are remembered as the upstream is taken to have


@dataclass(slots=True)
class Host:
    """settings: the front's own. hosting: of its port."""

    settings: Front
    hosting: Settings
    upstream: Upstream
    finder: Finder
    orders: Orders
    counting: Counting
    learning: Learning
    metrics: Metrics
    bodies: Bodies

    @classmethod
    def of(cls, settings: Front, hosting: Settings) -> Host:
        """Make a host. It connects once the application starts."""
        lengths = Lengths(COUNTED * settings.tree_nodes)
        orders = Orders(settings, lengths)
        metrics = Metrics(lambda: len(orders))
        upstream = Upstream(settings, has_keys=bool(hosting.api_key or hosting.api_key_file))
        return cls(
            settings,
            hosting,
            upstream=upstream,
            finder=Finder(upstream, settings.dialect),
            orders=orders,
            counting=Counting(upstream, lengths),
            learning=Learning(orders, metrics),
            metrics=metrics,
            bodies=Bodies.up_to(hosting.max_body << 20),
        )
