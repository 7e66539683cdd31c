"""The devices that a runner can use, and their properties."""
