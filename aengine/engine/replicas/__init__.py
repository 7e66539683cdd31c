"""The copies of the model behind one engine, and the choice among them."""
