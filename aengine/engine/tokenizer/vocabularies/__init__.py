"""Tokenizers of the ``tokenizers`` library, built out of other libraries' files."""
