"""Stores of KV that outlive an engine or are shared by several: their interface, and those that aengine brings."""
