"""Below host memory: tiers of records, in folders and archives. It stands above `slots/`, which knows nothing of it."""
