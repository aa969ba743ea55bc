"""The slot cache: the prefix tree of all cached KV, and the scheduler that runs requests on it.

The slot cache knows tokens, but no text.
"""
