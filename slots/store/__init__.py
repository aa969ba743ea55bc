"""The tiers below host memory: records in folders and archives.

These modules import `slots/`, which does not import them.
"""
