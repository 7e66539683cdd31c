"""Workers on other machines: what runs there, and the host's side of it."""
