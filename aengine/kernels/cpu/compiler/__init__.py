"""Machine code for this processor: written, compiled, loaded, and kept on disk."""
