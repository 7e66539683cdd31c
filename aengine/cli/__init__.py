"""The commands of ``python -m aengine``."""
