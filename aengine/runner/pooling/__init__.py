"""Vectors in place of tokens: embeddings and scores, of decoders and of encoders."""
