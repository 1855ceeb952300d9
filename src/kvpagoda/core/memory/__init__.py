"""WHERE rows live: the arena, pools over it, copies to the host and back.

Some files need torch, so import the modules one by one.
"""
