"""Below host memory: tiers of records, in folders and archives. This room uses `slots/`, which knows nothing of it."""
