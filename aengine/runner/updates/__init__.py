"""New weights for a model that is loaded, in pieces, into the memory that it has."""
