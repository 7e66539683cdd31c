"""Models of agent frameworks over an engine in the same process; docs/integrations.md has an example of each.

    from aengine.integrations.pydantic_ai import AEngineModel

    framework's messages, tools, settings ──> stream_chat ──> deltas ──> the framework's parts, events, chunks

Nothing is imported here: a file imports its framework when it is imported itself.
"""
