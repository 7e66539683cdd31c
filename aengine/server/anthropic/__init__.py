"""Anthropic's interface: messages, whole and as they come, and the count of their tokens."""
