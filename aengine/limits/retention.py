"""What OpenAI's and Anthropic's clients call the times for which KV is kept."""

from __future__ import annotations

SHORT = 300.0
"""Seconds of a request that names a session, and no time."""
SECONDS = {"in_memory": SHORT, "in-memory": SHORT, "5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200, "24h": 86_400}
