"""Handles of an engine: on the event loop that started it, or on a thread of its own that serves all loops."""
