"""Streams that callers read: the mailbox of a request and its readers, on the loop and across threads."""
