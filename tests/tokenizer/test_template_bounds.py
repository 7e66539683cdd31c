"""Chat templates of untrusted checkpoints: what would take long or much is stopped before it does."""

from __future__ import annotations

import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from aengine.engine.tokenizer import template_bounds
from aengine.engine.tokenizer.chat_template import ChatTemplate
from aengine.errors import InvalidRequestError

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "x" * 1000}]
DOUBLED = "{% set ns = namespace(x=%s) %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}{{ ns.x %s }}"


TWO = "{% set ns = namespace(x=%s, y=%s) %}{% for i in range(60) %}{% set ns.x = %s %}{% set ns.y = %s %}{% endfor %}"
DEEP = "{% set ns = namespace(x=(1,)) %}{% for i in range(20000) %}{% set ns.x = %s %}{% endfor %}{{ %s }}"
LONG = "{% set s = %s %}{% for i in range(25000) %}{% if %s %}{% endif %}{% endfor %}"


def render(template: str, **variables: Any) -> str:
    return ChatTemplate(template, {"bos_token": "<s>"}).render(MESSAGES, extra=variables)


def doubled(first: str, again: str, shown: str = "|length") -> str:
    return DOUBLED.replace("%s", first, 1).replace("%s", again, 1).replace("%s", shown, 1)


def two(first: str, again: str, shown: str) -> str:
    """Two values that are doubled, so that a comparison of both has no shortcut."""
    parts = (first, first, again, again.replace("ns.x", "ns.y"), shown)
    return filled(TWO + "{{ %s }}", *parts)


def filled(template: str, *parts: str) -> str:
    for part in parts:
        template = template.replace("%s", part, 1)
    return template


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "template",
    [
        "{{ 10**(10**7) > 1 }}",
        "{{ 'x'*(10**9) }}",
        "{{ (10**9) * 'x' }}",
        "{{ ([0]*(10**9))|length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format('x') }}",
        "{{ '{:>{w}}'.format('x', w=1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x'.zfill(1000000000) }}",
        "{{ ('\\t' * 100000).expandtabs(100000) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ 'x'|center(1000000000) }}",
        "{{ 'x\\ny'|indent(1000000000) }}",
        "{{ ('x\\n' * 1000000)|indent(1000) }}",
        "{{ [1]|batch(1000000000, 'x')|list }}",
        "{{ [1]|slice(1000000000)|list }}",
        "{{ [1, 2]|tojson(indent=1000000000) }}",
        "{{ 1.5|round(1000000000, 'ceil') }}",
        "{{ range(1000000000)|length }}",
        "{{ lipsum(n=1000000) }}",
        "{{ [messages] * 1000 | sum(start=[]) }}",
        "{{ ('x' * 10000).replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000)|replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000).replace('', 'y' * 10000) }}",
        "{{ ('y' * 10000).join(['x'] * 10000) }}",
        "{{ (['y' * 10000] * 10000)|join }}",
        "{{ ('x' * 10000).translate({120: 'y' * 10000}) }}",
        doubled("'x'", "ns.x ~ ns.x"),
        doubled("'x'", "ns.x + ns.x"),
        doubled("messages[0].content", "ns.x + ns.x"),
        doubled("[1]", "ns.x + ns.x"),
        doubled("2", "ns.x * ns.x", "> 1"),
        doubled("[1]", "[ns.x, ns.x]", ""),
        doubled("[1]", "[ns.x, ns.x]", "|tojson"),
        doubled("[1]", "[ns.x, ns.x]", "|string|length"),
        doubled("[1]", "{'a': ns.x, 'b': ns.x}", "|pprint"),
        "{% for i in range(25000) %}{% for j in range(25000) %}{% endfor %}{% endfor %}",
        "{% for i in range(25000) %}{% for j in range(25000) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
        "{% for i in range(25000) %}{{ range(25000)|map('upper')|list|length }}{% endfor %}",
        "{% for i in range(25000) %}{{ range(25000)|list|length }}{% endfor %}",
        "{% for i in range(25000) %}{{ 'x' * 60000000 }}{% endfor %}",
        two("[1]", "[ns.x, ns.x]", "ns.x == ns.y"),
        two("1", "dict(a=ns.x, b=ns.x)", "ns.x == ns.y"),
        two("1", "dict(a=ns.x, b=ns.x)", "ns.x is eq ns.y"),
        two("1", "dict(a=ns.x, b=ns.x)", "[ns.x]|select('equalto', ns.y)|list"),
        two("1", "dict(a=ns.x, b=ns.x)", "ns.x in dict(z=ns.y).values()"),
        two("1", "dict(a=ns.x, b=ns.x)", "(dict(z=ns.x).values()|list).count(ns.y)"),
        two("1", "dict(a=ns.x, b=ns.x)", "(dict(y=ns.x, z=ns.y).values()|list)|sort|length"),
        doubled("(1,)", "(ns.x, ns.x)", "in {}"),
        doubled("1", "namespace(a=ns.x, b=ns.x)", ""),
        doubled("1", "dict(a=ns.x, b=ns.x).items()", ""),
        filled(LONG, "'x' * 60000000", "'y' in s"),
        filled(LONG, "'x' * 60000000", "s[1:]"),
        filled(LONG, "[0] * 90000", "s.copy()"),
        filled(LONG, "range(25000)", "'x' in s"),
        "{{ ('a ' * 9000000).split()|length }}",
        "{{ ('a ' * 9000000).rsplit(' ')|length }}",
        "{{ ('a\n' * 9000000).splitlines()|length }}",
        "{{ ('a' * 60000000)|list|length }}",
        "{{ ('a' * 60000000)|sort|length }}",
        "{{ 1 }}" * 200_000,
        "{{ ('{0}' * 1000000).format('x' * 1000)|length }}",
        "{{ ('%(a)s' * 1000000) % {'a': 'x' * 1000} }}",
        "{{ ('%(a)s' * 1000000)|format(a='x' * 1000) }}",
    ],
)  # fmt: skip
def test_an_exhausting_template_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sixteenth of the steps, all of which take a second."""
    monkeypatch.setattr(template_bounds, "_STEPS", template_bounds._STEPS // 16)
    check_refused(template)


def check_refused(template: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refuses these messages") as caught:
        render(template)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "template",
    [
        filled(DEEP, "(ns.x,)", "{ns.x: 1}"),
        filled(DEEP, "dict(a=ns.x)|items|first", "{ns.x: 1}"),
        filled(DEEP, "dict(a=ns.x)|items|first", "{}.get(ns.x)"),
        filled(DEEP, "dict(a=ns.x)|items|first", "{}[ns.x]"),
    ],
)
def test_what_nests_too_deep_to_be_hashed_is_not_hashed(template: str) -> None:
    """Which would overflow the stack."""
    check_refused(template)


@pytest.mark.parametrize("call", ["ljust(%s)", "rjust(%s)", "center(%s, 'y')", "zfill(%s)"])
def test_a_text_of_great_width_is_not_made(call: str) -> None:
    """Once it is there, a gigabyte is taken."""
    with pytest.raises(InvalidRequestError, match=r"asks for 1e\+09, where 131072 is the most"):
        render("{{ 'x'.%s }}".replace("%s", call).replace("%s", "1000000000"))


def test_a_text_that_would_be_too_long_is_not_made() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            render("{{ ('x' * 10000).replace('x', 'y' * 10000) }}")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000, "the text has 100,000,000 letters"
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_long_chats_stay_within_the_bounds() -> None:
    """What templates do with each message, over thousands."""
    template = (
        "{{ bos_token }}{% for message in messages %}"
        "{% if loop.index0 == messages|length - 1 or loop.last %}LAST{% endif %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message['content']|trim + '<|im_end|>' ~ '\\n' }}"
        "{% set before = messages|selectattr('role', 'equalto', 'system')|list %}{% endfor %}"
        "{{ tools|tojson(indent=4) }}"
    )
    messages = [{"role": "user", "content": f"{i} " * 20} for i in range(1000)]
    text = ChatTemplate(template, {"bos_token": "<s>"}).render(messages, tools=[{"a": [1, 2]}] * 200)
    assert text.count("<|im_start|>") == 1000 and text.count("LAST") == 1


def test_arithmetic_and_texts_are_as_ever() -> None:
    assert render("{{ 2**10 + 3 * 4 }} {{ 'ab' * 3 }} {{ [1] * 2 }} {{ '%5.1f|%-4s' % (1.25, 'a') }}") == (
        "1036 ababab [1, 1]   1.2|a   "
    )
    assert (
        render("{{ '{:>5}'.format('x') }}{{ 'a,b'.split(',')|join('-') }}{{ ', '.join(['a', 'b']) }}") == "    xa-ba, b"
    )
    assert render("{% for x in y %}{{ loop.index }}/{{ loop.length }} {% else %}none{% endfor %}", y=["a", "b"]) == (
        "1/2 2/2 "
    )
    tree = [{"n": 1, "below": [{"n": 2}, {"n": 3}]}, {"n": 4}]
    nested = "{% for x in y recursive %}{{ x.n }}{% if x.below %}({{ loop(x.below) }}){% endif %}{% endfor %}"
    assert render(nested, y=tree) == "1(23)4"
    assert render("{{ 'axa'.replace('a', 'b') }}{{ 'axa'.replace('a', 'b', 1) }}") == "bxbbxa"
    with pytest.raises(InvalidRequestError, match="positional argument"):
        render("{{ 'x'.replace('x') }}")
    assert render("{% for x in missing %}{% else %}none{% endfor %}{{ [1, 2]|sum }}{{ 'x'.rjust(3) }}") == "none3  x"
    assert (
        render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': [1]}|tojson }}") == 'a1{"a": [1]}'
    )


def test_comparisons_literals_and_slices_are_as_ever() -> None:
    template = (
        "{% set first, rest = messages[0], messages[1:] %}{{ rest == [] }} {{ first.role in ('user', 'x') }} "
        "{{ 1 < 2 < 3 }} {{ 'b' not in 'abc' }} {{ {'a': [1, (2, 3)]}['a'][1][0] }} {{ 'abcd'[1:3] }} {{ (1, 2)[:1] }} "
        "{% for k, v in {'x': 1}.items() %}{{ k ~ v }}{% endfor %} {{ missing is defined }} {{ missing == 1 }} "
        "{{ 'a-b-c'.split('-', 1) | last }} {{ 'a\\nb'.splitlines() | length }} {{ 'a b'.split() | first }} "
        "{{ [3, 1]|sort }} {{ '%s=%d' % ('a', 1) }} {{ '%(a)s'|format(a=2) }}"
    )
    assert render(template) == "True True True False 2 bc (1,) x1 False False b-c 2 a [1, 3] a=1 2"


def test_the_sandbox_needs_a_release_without_its_hole() -> None:
    """Before 3.1.6 a template got at str.format by the filter attr, and so at all modules (CVE-2025-27516)."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (jinja,) = (Requirement(line) for line in project["dependencies"] if line.startswith("jinja2"))
    assert "3.1.5" not in jinja.specifier and "3.1.6" in jinja.specifier
    with pytest.raises(InvalidRequestError):
        render("{{ ('{0.__init__.__globals__}'|attr('format'))(joiner) }}")
