"""Scopes that tests share KV in."""

from slotcache.slots.scope import Scope

COMMON = Scope.shared("")
"""The scope of requests that name none."""
