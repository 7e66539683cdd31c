"""What a text may be: constraints, and the two libraries that hold a model to them."""
