"""KV that is kept for the next turn of a session, before what nobody asked to keep."""
