"""The tiers below host memory: records in folders and archives.

The modules of `slots/store/` import modules of `slots/`. No other module of `slots/` imports a module of `slots/store/`.
"""
