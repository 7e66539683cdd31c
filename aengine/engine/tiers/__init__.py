"""KV that leaves the device and comes back: which pages are in which tier, and the jobs that copy them."""
