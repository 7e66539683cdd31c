"""Where weights come from: files, or random numbers; and how each tensor gets to its place."""
