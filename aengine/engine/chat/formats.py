"""Formats in which models write tool calls and reasoning: a few strings for each family.

    <tool_call>\\n {"name": "  get_time  ", "arguments":   {"zone": "UTC"}  }\\n</tool_call>     hermes
    └ trigger                  name                       arguments        after_arguments
    └────── before_name ────┘        └ before_arguments ┘

    opening  call  (separator call)*  closing        several calls: a group

These strings are all there is to a format. `compose.py` writes the grammar from them, blanks included, and
`parser.py` looks for the very same ones, so what is allowed is understood. (It understands a few other spellings
besides: `spellings.py`.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..structured.parts import BLANKS
from .syntax import harmony
from .syntax.arguments import JSON_OBJECT, ArgumentSyntax
from .syntax.literals import Literals
from .syntax.markers import NO_MARKERS, Markers, TokenId
from .syntax.parameters import Parameters

ID = "{id}"
"""Stands for a call's id in a format's strings; no tool's name has braces."""
INDEX = "{index}"
"""Stands for a call's number in a format's strings: 1 to `INDEX_DIGITS` digits."""
INDEX_DIGITS = 3

NAME = "{tool}"
"""Stands for a tool's name, where a head of calls of any tool is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The tool call format of one family of models: unless it says otherwise, JSON objects with a name and arguments,
    as of a list. Names stand in it as they are: their letters need no quoting."""

    name: str
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    """Only when this has come is a call complete."""
    separator: str = ", "
    """Between two calls of a group."""
    openings: tuple[str, ...] = ("",)
    """What a group may begin with: one of these."""
    closing: str = ""
    closings: tuple[str, ...] = ()
    """One for each of ``openings``, instead of ``closing``."""
    triggers: tuple[str, ...]
    """Marks of the beginning of a call: one for each of ``openings``, or one for all. A prefix of
    ``opening + before_name``; what follows it is forced, and text can't contain it."""
    names_trigger: bool = False
    """Only with the name of a tool and what follows that is a trigger one: text may begin with what it is without."""
    arguments: ArgumentSyntax = JSON_OBJECT
    """How the arguments are written, between ``before_arguments`` and ``after_arguments``."""
    text: Literal["around", "before", "instead"] = "before"
    """Text may stand before, between and after calls; before them only; or only where there are no calls."""
    markers: tuple[str, ...] = ()
    """The parts of these strings that are control tokens in some vocabularies."""
    id_length: int | None = None
    """Length of a call's id, where the family's chat template insists on one."""
    before_arguments_with_id: str = ""
    """Replaces ``before_arguments`` where the model writes the call's id too, which it may: "{id}" stands for
    ``id_length`` letters and digits. They are read over: ids are the parser's own."""
    after_arguments_with_id: str = ""
    """Replaces ``after_arguments`` there."""
    written_id: str = ""
    """What the model takes for the id of a call: "{name}" stands for the tool's name and "{index}" for the number that
    it has written. Ids are made of it, as the chat template shows them in the next turn."""
    text_marks: tuple[tuple[str, str], ...] = ()
    """Control tokens between which a text may stand."""
    parallel: bool = True
    """Several calls in one answer are usual. False: the family's chat templates can't show them in the next turn."""
    channels: bool = False
    """The answer consists of messages on channels, as harmony's (`syntax/harmony.py`)."""
    tokens: Markers = NO_MARKERS
    """Those of ``markers`` that the strings have as tokens: see `in_vocabulary`."""
    tools_key: str = ""
    """Where the chat template looks for the tools' JSON in the system message, if it takes no list of tools. It can't
    show calls and their results then."""
    calls_in_text: bool = False
    """The chat template shows tools and results, but no calls: they are written into the text of the answer."""
    instructions: str = ""
    """Text for the system prompt, with ``{tools}`` in it, if no chat template shows such a model its tools."""

    def __post_init__(self) -> None:
        if len(self.triggers) not in (1, len(self.openings)):
            raise ValueError(f"the format {self.name} needs one trigger for each opening, or one for all")
        if self.closings and len(self.closings) != len(self.openings):
            raise ValueError(f"the format {self.name} needs one closing for each opening")
        for index, opening in enumerate(self.openings):
            trigger = self.trigger_of(index)
            if not trigger or not (opening + self.before_name).startswith(trigger):
                raise ValueError(f"the trigger {trigger!r} of the format {self.name} does not begin its calls")
        if self.id_length is None and (self.before_arguments_with_id or self.after_arguments_with_id):
            raise ValueError(f"the format {self.name} must say how long an id is")

    def head(self, tool_name: str) -> str:
        """Return a call up to its arguments, as it is written without an id, and as the first of its conversation."""
        return f"{self.before_name}{tool_name}{self.before_arguments}".replace(INDEX, "0")

    def heads(self, tool_name: str) -> tuple[str, ...]:
        """Return the `head` with `INDEX` in it, and the one with an id (see `ID`) if there is one."""
        if self.channels:
            return tuple(map(self.tokens.encode, harmony.heads(tool_name)))
        ends = (self.before_arguments, self.before_arguments_with_id)[: 1 + bool(self.before_arguments_with_id)]
        return tuple(f"{self.before_name}{tool_name}{end}" for end in ends)

    @property
    def is_group(self) -> bool:
        """Whether calls stand between an opening and a closing."""
        return bool(self.closing or self.closings)

    def trigger_of(self, opening: int) -> str:
        """Return what marks the beginning of a group that begins with this one of ``openings``."""
        return self.triggers[opening % len(self.triggers)]

    def closing_of(self, opening: int) -> str:
        """Return what ends a group that began with this one of ``openings``."""
        return self.closings[opening] if self.closings else self.closing

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts that may follow the arguments."""
        return (self.after_arguments, self.after_arguments_with_id)[: 1 + bool(self.after_arguments_with_id)]

    def describe(self, tools: Iterable[Mapping[str, Any]]) -> str:
        """Return these tools' description (`Tool.for_template`) for a system prompt; "" if the template has it."""
        lines = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        return self.instructions.replace("{tools}", "\n".join(lines)) if self.instructions else ""

    @property
    def shows_calls(self) -> bool:
        """Whether the chat template shows earlier calls and their results."""
        return not (self.instructions or self.tools_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The format of reasoning, which precedes the answer. Optional, unless the prompt has begun it already."""

    begin: str = "<think>"
    end: str = "</think>"
    markers: tuple[str, ...] = ()
    """Parts of ``begin`` that are control tokens in some vocabularies, besides all of it."""
    begun: bool = False
    """The prompt ends with ``begin``, so the completion is reasoning from its first character on."""
    is_continued: bool = False
    """The prompt ends in the midst of it."""

    def after_prompt(self, prompt: str) -> ReasoningFormat | None:
        """Return the format after this prompt: begun by it; None if it is closed already (thinking is off)."""
        prompt = prompt.rstrip(BLANKS)
        if prompt.endswith(self.end):
            return None
        return replace(self, begun=prompt.endswith(self.begin.rstrip(BLANKS)))


HERMES = ToolFormat(
    name="hermes",
    before_name='<tool_call>\n{"name": "',
    after_arguments="}\n</tool_call>",
    separator="\n",
    triggers=("<tool_call>",),
    text="around",
    markers=("<tool_call>", "</tool_call>"),
)
LLAMA3 = ToolFormat(
    name="llama3",
    before_arguments='", "parameters": ',
    separator="; ",
    openings=("", "<|python_tag|>"),
    triggers=('{"name": "', "<|python_tag|>"),
    text="instead",
    markers=("<|python_tag|>",),
    parallel=False,
)
MISTRAL = ToolFormat(
    name="mistral",
    openings=("[TOOL_CALLS] [", "[TOOL_CALLS]["),  # SentencePiece leaves out a blank that a text begins with
    closing="]",
    triggers=("[TOOL_CALLS]",),
    markers=("[TOOL_CALLS]",),
    id_length=9,
    after_arguments_with_id=f', "id": "{ID}"}}',
)
MISTRAL_TEKKEN = replace(MISTRAL, name="mistral_tekken", openings=("[TOOL_CALLS][",))
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    before_name="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    after_arguments="",
    separator="",
    triggers=("[TOOL_CALLS]",),
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    id_length=9,
    before_arguments_with_id=f"[CALL_ID]{ID}[ARGS]",
)
JSON = ToolFormat(
    name="json",
    openings=('{"tool_calls": [',),
    closing="]}",
    triggers=('{"tool_calls": [',),
    instructions=(
        "You can call these functions, each described by a JSON schema, one a line:\n{tools}\n\n"
        "To call functions, end your answer with a line of this form, and write nothing after it:\n"
        '{"tool_calls": [{"name": "<name of the function>", "arguments": {<its arguments>}}]}\n'
        'What they return comes next, as {"tool_results": [{"name": "<name of the function>", "content": ...}]}'
    ),
)

QWEN3_CODER = replace(
    HERMES,
    name="qwen3_coder",
    before_name="<tool_call>\n<function=",
    before_arguments=">\n",
    arguments=Parameters(before_key="<parameter=", after_key=">\n", after_value="\n</parameter>\n"),
    after_arguments="</function>\n</tool_call>",
)
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed_oss",
    before_name="<seed:tool_call>\n<function=",
    arguments=Parameters(before_key="<parameter=", after_key=">", after_value="</parameter>\n"),
    after_arguments="</function>\n</seed:tool_call>",
    triggers=("<seed:tool_call>",),
    markers=("<seed:tool_call>", "</seed:tool_call>"),
)
GLM = replace(
    HERMES,
    name="glm",
    before_name="<tool_call>",
    before_arguments="\n",
    arguments=Parameters(before_key="<arg_key>", after_key="</arg_key>\n<arg_value>", after_value="</arg_value>\n"),
    after_arguments="</tool_call>",
    markers=(*HERMES.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM_INLINE = replace(
    GLM,
    name="glm_inline",
    before_arguments="",
    arguments=Parameters(before_key="<arg_key>", after_key="</arg_key><arg_value>", after_value="</arg_value>"),
    separator="",
)
MINIMAX = ToolFormat(
    name="minimax",
    openings=("<minimax:tool_call>\n",),
    before_name='<invoke name="',
    before_arguments='">\n',
    arguments=Parameters(before_key='<parameter name="', after_key='">', after_value="</parameter>\n"),
    after_arguments="</invoke>\n",
    separator="",
    closing="</minimax:tool_call>",
    triggers=("<minimax:tool_call>",),
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    openings=("<｜tool▁calls▁begin｜>",),
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    before_arguments="\n```json\n",
    after_arguments="\n```<｜tool▁call▁end｜>",
    separator="\n",
    closing="<｜tool▁calls▁end｜>",
    triggers=("<｜tool▁calls▁begin｜>",),
    markers=(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    before_name="<｜tool▁call▁begin｜>",
    before_arguments="<｜tool▁sep｜>",
    after_arguments="<｜tool▁call▁end｜>",
    separator="",
)
GRANITE = ToolFormat(
    name="granite",
    openings=("<|tool_call|>[",),
    closing="]",
    triggers=("<|tool_call|>",),
    markers=("<|tool_call|>",),
)
PHI4 = replace(
    GRANITE,
    name="phi4",
    tools_key="tools",
    closing="]<|/tool_call|>",
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
_PYTHON_CALL: dict[str, Any] = {
    "before_name": "",
    "before_arguments": "(",
    "arguments": Literals(),
    "after_arguments": ")",
}
LLAMA_PYTHONIC = ToolFormat(
    name="llama_pythonic",
    openings=("[", "<|python_start|>["),
    **_PYTHON_CALL,
    separator=", ",
    closings=("]", "]<|python_end|>"),
    triggers=("[", "<|python_start|>["),
    names_trigger=True,
    text="instead",
    markers=("<|python_start|>", "<|python_end|>"),
)
LFM2 = ToolFormat(
    name="lfm2",
    openings=("<|tool_call_start|>[",),
    **_PYTHON_CALL,
    separator=", ",
    closing="]<|tool_call_end|>",
    triggers=("<|tool_call_start|>",),
    text="around",
    markers=("<|tool_call_start|>", "<|tool_call_end|>"),
)
LFM2_JSON = replace(
    LFM2,
    name="lfm2_json",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    arguments=JSON_OBJECT,
    after_arguments="}",
)
OLMO3 = ToolFormat(
    name="olmo3",
    openings=("<function_calls>", "<function_calls>\n"),
    **_PYTHON_CALL,
    separator="\n",
    closings=("</function_calls>", "\n</function_calls>"),
    triggers=("<function_calls>",),
)
GEMMA4 = ToolFormat(
    name="gemma4",
    before_name="<|tool_call>call:",
    before_arguments="{",
    arguments=Literals(assign=":", separator=",", quote='<|"|>'),
    after_arguments="}<tool_call|>",
    separator="",
    triggers=("<|tool_call>",),
    text="around",
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
KIMI_K2 = ToolFormat(
    name="kimi_k2",
    openings=("<|tool_calls_section_begin|>",),
    before_name="<|tool_call_begin|>functions.",
    before_arguments=f":{INDEX}<|tool_call_argument_begin|>",
    after_arguments="<|tool_call_end|>",
    separator="",
    closing="<|tool_calls_section_end|>",
    triggers=("<|tool_calls_section_begin|>",),
    markers=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    written_id=f"functions.{{name}}:{INDEX}",
)
COHERE = ToolFormat(
    name="cohere",
    openings=("<|START_ACTION|>[\n    ", "<|START_ACTION|>["),
    before_name=f'{{"tool_call_id": "{INDEX}", "tool_name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator=",\n    ",
    closings=("\n]<|END_ACTION|>", "]<|END_ACTION|>"),
    triggers=("<|START_ACTION|>",),
    markers=(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    ),
    text_marks=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
)

HARMONY = ToolFormat(
    name="harmony",
    before_name="<|channel|>commentary to=functions.",
    before_arguments=" <|constrain|>json<|message|>",
    after_arguments="",
    separator="",
    triggers=("<|channel|>commentary to=",),
    markers=harmony.MARKERS,
    channels=True,
    parallel=False,
)
"""gpt-oss'. Not one of ``FORMATS``, whose answers are text with calls in it."""

FORMATS = {known.name: known for known in (
    HERMES, QWEN3_CODER, GLM, GLM_INLINE, SEED_OSS, MINIMAX, LLAMA3, MISTRAL, MISTRAL_TEKKEN, MISTRAL_ARGS,
    DEEPSEEK_V3, DEEPSEEK_V31, GRANITE, PHI4, LLAMA_PYTHONIC, LFM2, LFM2_JSON, OLMO3, GEMMA4, KIMI_K2, COHERE, JSON,
)}  # fmt: skip


_FENCED_IN_TOOL_CALL = "```json"
"""Hunyuan's templates put JSON in a code block between <tool_call> and </tool_call>, which `HERMES` does not."""

_GLM_LINES = re.compile(r"</arg_key>\s*(?:\n|\\n)\s*<arg_value>")


def detect(chat_template: str) -> tuple[ToolFormat, ReasoningFormat | None]:
    """Find a model's formats by its chat template."""
    tool_format = _tool_format(chat_template)
    if tool_format is HARMONY:
        return HARMONY, ReasoningFormat(begin=harmony.ANALYSIS, end="<|end|>")
    return tool_format, _reasoning_format(chat_template)


def _tool_format(template: str) -> ToolFormat:
    if "<tool_call>" in template and _FENCED_IN_TOOL_CALL not in template:
        if "<arg_key>" in template:
            return GLM if _GLM_LINES.search(template) else GLM_INLINE
        return QWEN3_CODER if "<function=" in template else HERMES
    for sign, known in _SIGNS:
        if all(part in template for part in sign):
            return known
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" in template:
            return MISTRAL_ARGS
        return MISTRAL_TEKKEN if "[TOOL_CALLS][" in template else MISTRAL
    return JSON


_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    ((harmony.FINAL, "<|start|>assistant"), HARMONY),
    (("<minimax:tool_call>",), MINIMAX),
    (("<seed:tool_call>", "<function="), SEED_OSS),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), KIMI_K2),
    (("<|START_ACTION|>", '"tool_name": "'), COHERE),
    (("<|tool_call>call:",), GEMMA4),
    (("<function_calls>", "tool_calls"), OLMO3),
    (("<|tool_call_start|>[", '{"name": "'), LFM2_JSON),
    (("<|tool_call_start|>[",), LFM2),
    (("<|tool_list_start|>",), replace(LFM2, calls_in_text=True)),
    (("[func_name1(",), LLAMA_PYTHONIC),
    (("<|start_header_id|>", '"parameters": '), LLAMA3),
    (("<|header_start|>", '"parameters": '), LLAMA3),
    (("<|start_of_role|>", "<|tool_call|>"), GRANITE),
    (("<|tool|>", "message['tools']"), PHI4),
)
"""Texts of templates, all of which one kind has, and no kind further down unless it has more."""


def _reasoning_format(template: str) -> ReasoningFormat | None:
    """Find the reasoning; whether the prompt begins it is a guess that `ReasoningFormat.after_prompt` corrects."""
    found = next((known for known in _REASONING if known.end in template), None)
    if found is None:
        return None
    prompt = template.rpartition("add_generation_prompt")[2]
    begin, end = prompt.rfind(found.begin), prompt.rfind(found.end)
    return replace(found, begun=begin > end)


_REASONING = (
    ReasoningFormat(),
    ReasoningFormat(begin="<seed:think>", end="</seed:think>"),
    ReasoningFormat(begin="[THINK]", end="[/THINK]"),
    ReasoningFormat(begin="<|START_THINKING|>", end="<|END_THINKING|>"),
    ReasoningFormat(begin="<|channel>thought\n", end="<channel|>", markers=("<|channel>",)),
)


def markers_of(tool_format: ToolFormat | None, reasoning: ReasoningFormat | None, token_id: TokenId) -> Markers:
    """Return the markers of both formats that are tokens of the vocabulary."""
    names = list(tool_format.markers) if tool_format is not None else []
    if reasoning is not None:
        names += [reasoning.begin, reasoning.end, *reasoning.markers]
    return Markers.of(names, token_id)


_STRINGS = (
    "before_name", "before_arguments", "after_arguments", "separator", "openings", "closing", "closings", "triggers",
    "before_arguments_with_id", "after_arguments_with_id", "text_marks",
)  # fmt: skip
"""What the model writes of a `ToolFormat`, besides arguments."""


def in_vocabulary(
    tool_format: ToolFormat, reasoning: ReasoningFormat | None, token_id: TokenId
) -> tuple[ToolFormat, ReasoningFormat | None]:
    """Return both formats with those markers that are tokens of the vocabulary written as such: see `Markers`."""
    markers = markers_of(tool_format, reasoning, token_id)

    def encoded(value: Any) -> Any:
        return markers.encode(value) if isinstance(value, str) else tuple(map(encoded, value))

    if reasoning is not None:
        reasoning = replace(reasoning, begin=encoded(reasoning.begin), end=encoded(reasoning.end))
    strings = {name: encoded(getattr(tool_format, name)) for name in _STRINGS}
    arguments = tool_format.arguments.in_vocabulary(markers)
    return replace(tool_format, tokens=markers, arguments=arguments, **strings), reasoning
