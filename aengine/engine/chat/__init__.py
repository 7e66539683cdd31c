"""Chat completions of several parts: reasoning, text, tool calls, and answers of a shape.

    messages, tools, shape ──compose──> GrammarSpec      what the completion may be
                                             │
    completion, as it streams ─ChatParser─> deltas       what it says

Both read the same `ToolFormat` and `ReasoningFormat`. Nothing here depends on the engine.
"""

from .compose import compose
from .formats import FORMATS, ReasoningFormat, TextTokenId, ToolFormat, detect
from .messages import ChatMessage, Delta, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, ToolCallEnd, ToolCallStart
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
    "TextTokenId",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolChoice",
    "ToolFormat",
    "compose",
    "detect",
    "tools_of",
]
