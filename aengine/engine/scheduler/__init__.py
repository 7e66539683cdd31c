"""Decides what every step computes. Pure: no asyncio, no torch, no clock of its own."""
