"""Ops that are compiled for a CPU, and the tapes that run them. Imports go `compiler` <- `packed` <- the files here."""
