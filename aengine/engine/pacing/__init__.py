"""How far ahead of its answers the worker gets steps, and how many prompt tokens a step may have."""
