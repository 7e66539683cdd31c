"""Loops and pools of threads: how work leaves the host's loop and comes back."""
