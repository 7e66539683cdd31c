"""Attention over the paged KV: torch, Triton, and libraries for prompts."""
