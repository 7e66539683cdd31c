"""The grammar backend over llguidance."""
