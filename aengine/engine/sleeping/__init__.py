"""An engine that gives its memory back for a while, and wakes by itself or when it is told to (docs/sleep.md)."""
