"""Steps in which a request may get several tokens: guesses at what comes next are computed with them, and verified."""
