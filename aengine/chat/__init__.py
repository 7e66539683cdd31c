"""Chat completions of several parts: reasoning, text, tool calls, and answers of a schema.

    messages, tools, schema ──compose──> GrammarSpec     what the completion may be
                                              │
    completion, as it streams ─ChatParser─> deltas       what it says

Both read the same `ToolFormat` and `ReasoningFormat`. Nothing here knows of the engine.
"""

from .compose import blame, compose, suspects
from .formats import FORMATS, ReasoningFormat, ToolFormat, detect
from .messages import (
    ChatMessage,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from .parser import ChatParser
from .tools import Tool, ToolChoice, tools_of

__all__ = [
    "FORMATS",
    "ChatMessage",
    "ChatParser",
    "Delta",
    "ReasoningDelta",
    "ReasoningFormat",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolChoice",
    "ToolFormat",
    "blame",
    "compose",
    "detect",
    "suspects",
    "tools_of",
]
