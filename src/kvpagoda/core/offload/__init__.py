"""Blocks and checkpoints of a cache in its tiers: what is stored when, and how a text is found and loaded again."""
