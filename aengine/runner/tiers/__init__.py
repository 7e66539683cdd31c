"""Pages of KV in memory of the host's process, which outlives a worker."""
