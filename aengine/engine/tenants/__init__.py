"""Fair shares of an engine for those who ask: counters, quotas, turns."""
