"""Scopes for the shared KV of tests."""

from slotcache.slots.scope import Scope

COMMON = Scope.shared("")
"""The scope of requests that name no scope."""
