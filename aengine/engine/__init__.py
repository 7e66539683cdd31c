"""The host half: everything that runs on the user's event loop. Never imports torch."""
