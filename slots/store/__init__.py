"""The tiers below host memory: records in folders and archives.

These modules import modules of `slots/`. The modules of `slots/` do not import these.
"""
