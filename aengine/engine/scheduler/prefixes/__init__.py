"""Prefixes that others can take over, beside the blocks that they are made of."""
