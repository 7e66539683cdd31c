"""Layers of the models. They hold weights and take what they use; nothing here is global."""
