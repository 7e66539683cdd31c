"""Limits of the system: of the container and of the shell, free memory. Never imports torch."""
