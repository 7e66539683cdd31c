"""What changes the engine over HTTP: the keys that requests show, and the routes that need the admin key."""
