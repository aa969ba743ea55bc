"""From lower tiers back to host memory, when the server starts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..archive import Record
from .tier import LowerTier

logger = logging.getLogger("slotcache.tiers")


def load_records(tier: LowerTier, num_bytes: int, adopt: Callable[[str, Record], bool]) -> int:
    """Give `adopt` the records of a tier that were used last, up to `num_bytes`, beginnings first. Return how many it took.

    adopt: gets the record's key, too. A record may be dropped from the tier between its reading and its adoption, and
    must not come back then: ask whether `key in tier` where the record enters the cache. Raises TimeoutError if it does.
    """
    count = 0
    for key in tier.load(num_bytes):
        try:
            record = tier.get(key)
            count += record is not None and adopt(key, record)
        except TimeoutError:
            raise
        except Exception:  # one record must not keep the remaining ones from coming back
            logger.exception("%s is not used", key)
    return count
