"""Structured output: constraints on a text, their grammars, and the bitmasks that hold a model to them."""
