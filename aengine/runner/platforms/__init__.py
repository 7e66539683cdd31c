"""The devices that a runner can use, and what each says of itself."""
