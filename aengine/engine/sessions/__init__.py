"""Sessions: conversations that remember what was said, whose KV is kept between their turns."""
