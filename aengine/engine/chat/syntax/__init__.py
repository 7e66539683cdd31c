"""The ways in which models write the arguments of calls, and gpt-oss' channels."""
