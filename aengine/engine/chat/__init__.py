"""Chat completions of several parts: reasoning, text, tool calls, and answers of a shape.

    messages, tools, shape ──compose──> GrammarSpec      what the completion may be
                                             │
    completion, as it streams ─ChatParser─> deltas       what it says

Both read the same `ToolFormat` and `ReasoningFormat`. Nothing here depends on the engine.
"""
