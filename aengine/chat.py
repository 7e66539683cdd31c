"""Tools, messages and deltas of chats, and what reads and writes them: the public names of `engine/chat/`."""

from .engine.chat.compose import compose
from .engine.chat.formats import FORMATS, ReasoningFormat, ToolFormat, detect
from .engine.chat.messages import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from .engine.chat.parser import ChatParser
from .engine.chat.syntax.markers import TextTokenId
from .engine.chat.tools import Tool, ToolChoice, tools_of

__all__ = [
    "FORMATS",
    "ChatChoice",
    "ChatCompletion",
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
