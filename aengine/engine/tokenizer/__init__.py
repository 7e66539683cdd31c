"""Text and tokens: encoding off the loop, chat templates, incremental decoding, stop strings."""
