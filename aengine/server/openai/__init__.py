"""OpenAI's interfaces. Each file turns the bodies of one into calls of the engine, and back."""
