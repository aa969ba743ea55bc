"""The slot cache: the prefix tree over everything that has KV, and the scheduler that runs requests on it. Tokens only."""
