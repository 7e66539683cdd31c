"""What the models are made of. Layers hold weights and take what they use; nothing here is global."""
