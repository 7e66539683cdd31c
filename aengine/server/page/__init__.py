"""A page at ``/``: a chat with the model, and graphs of what the engine does. Its files are in ``static/``."""
