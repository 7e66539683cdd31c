"""Calls that give vectors and scores in place of text: what is asked, and what answers it on the engine's loop."""
