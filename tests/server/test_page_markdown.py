"""The page's Markdown: which elements a text becomes, whole and in parts, and from a hostile model. Run by node."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import aengine.server.page

STATIC = Path(aengine.server.page.__file__).with_name("static")
SCRIPT = Path(__file__).with_name("markdown_trees.mjs")
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


def render(*texts: list[str]) -> list[dict[str, Any]]:
    """``tree`` and ``parsed`` of each text, which is given in its parts."""
    given = json.dumps([{"parts": parts} for parts in texts])
    command = [str(NODE), str(SCRIPT), str(STATIC)]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def code(language: str, text: str) -> str:
    name = json.dumps(language) if language else ""
    head = f'div className="code-head"(span({name}) button className="copy" type="button"("Copy"))'
    return f'div className="code-block"({head} pre(code({json.dumps(text)})))'


LINK = 'a href="https://a.org/b" title="https://a.org/b" target="_blank" rel="noopener noreferrer nofollow"'
RIGHT = 'className="right"'
SHOWN = [
    ("# One\n\n###### Six", 'h3("One") h6("Six")'),
    ("*a* **b** ~~c~~ `d`\ne", 'p(em("a") " " strong("b") " " s("c") " " code("d") br() "e")'),
    ("3. a\n4. b\n   - c\n\n5. d", 'ol start=3(li(p("a")) li(p("b") ul(li("c"))) li(p("d")))'),
    ("```py\nx = 1\n```\nafter", code("py", "x = 1\n") + ' p("after")'),
    ("```\nnot ended", code("", "not ended")),
    (
        "| a | b |\n|---|--:|\n| 1 | 2 |",
        f'table(thead(tr(th("a") th {RIGHT}("b"))) tbody(tr(td("1") td {RIGHT}("2"))))',
    ),
    ("> quoted\n\n---", 'blockquote(p("quoted")) hr()'),
    ("https://a.org/b main.py a@b.org", f'p({LINK}("https://a.org/b") " main.py a@b.org")'),
]


@needs_node
def test_what_a_text_becomes() -> None:
    answers = render(*([text] for text, _ in SHOWN))
    for (text, tree), answer in zip(SHOWN, answers):
        assert answer["tree"] == f"box({tree})", text


@needs_node
def test_what_is_nested_too_deep_is_shown_as_it_was_written() -> None:
    """The parser leaves it out, and the answer would look empty."""
    quote, items = ">" * 1000 + " deep\n\n", "\n".join(" " * 2 * i + f"- item {i}" for i in range(300))
    for text, answer in zip((quote, items), render(["a\n\n" + quote + "# b"], ["a\n\n" + items])):
        after = ' h3("b")' if text is quote else ""
        assert answer["tree"] == f'box(p("a") div className="source"({json.dumps(text.rstrip())}){after})'


@needs_node
def test_code_is_shown_in_its_own_order() -> None:
    for text in ("`a\u202eb\u2066`", "```\na\u202eb\u2066"):
        assert r"a\\u202eb\\u2066" in render([*text])[0]["tree"]


HOSTILE = [
    '<img src=x onerror="alert(1)">',
    "<script>alert(1)</script>",
    "<svg/onload=alert(1)>\n\n<iframe src=javascript:alert(1)>",
    "[x](javascript:alert(1)) [x](JaVaScRiPt:alert(1)) [x](&#106;avascript:alert(1)) [x](java\tscript:alert(1))",
    "[x](vbscript:x) [x](data:text/html,<script>alert(1)</script>) [x](file:///etc/passwd) [x](blob:x)",
    "[x](/v1/models) [x](//evil.example/a) [x](#id) [x](page/page.js)",
    "![x](https://evil.example/?leak=1) ![x](data:image/gif;base64,R0lGODlhAQABAAAAACw=) ![](javascript:alert(1))",
    '[x](https://a.org "\\" onmouseover=alert(1) x=\\"") <https://a.org/"onclick=alert(1)> <javascript:alert(1)>',
    "[a]: javascript:alert(1)\n\n[a] [b][a]",
    '```"><script>alert(1)</script>\nx\n```',
    "| a |\n|:-:|\n| <b onclick=alert(1)> |",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x&#62;",
]
ELEMENTS = set("box p h3 h4 h5 h6 ul ol li hr blockquote table thead tbody tr th td strong em s a br span".split())
ELEMENTS |= {"div", "button", "pre", "code"}


@needs_node
def test_a_hostile_text_becomes_nothing_but_known_elements() -> None:
    """No element that loads or runs anything, no attribute beside our own, no address but the web's and mail's."""
    for text, answer in zip(HOSTILE, render(*([text] for text in HOSTILE))):
        tree = re.sub(r'(?<=[( ])"(?:[^"\\]|\\.)*"', '""', answer["tree"])  # the texts
        assert set(re.findall(r"(\w+)(?: \w+=\S+)*\(", tree)) <= ELEMENTS, text
        assert set(re.findall(r" (\w+)=", tree)) <= {"href", "title", "target", "rel", "className", "type"}, text
        assert all(address.startswith("https://") for address in re.findall(r'href="([^"]*)"', tree)), text
    assert 'img src=x onerror=\\"alert(1)\\"' in render([HOSTILE[0]])[0]["tree"]  # it is shown as it was written


PIECES = [
    *("# Title\n", "text *with* `code`\n", "\n", "- item\n", "  - inner\n", "1. one\n", "2. two\n", "> quote\n"),
    *("---\n", "===\n", "```py\n", "```\n", "x = [1]\n", "    indented\n", "| a | b |\n", "|---|---|\n", "| 1 | 2 |\n"),
    *("**bold\n", "a\r\nb\r\n", "~~~\n"),
]


@needs_node
def test_in_parts_it_becomes_what_it_is_as_a_whole() -> None:
    rng = random.Random(7)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 25))) for _ in range(300)]
    parts = []
    for text in texts:
        cuts = sorted({0, *(rng.randrange(len(text)) for _ in range(12)), len(text)})
        parts.append([text[a:b] for a, b in zip(cuts, cuts[1:])])
    for text, whole, pieces in zip(texts, render(*([text] for text in texts)), render(*parts)):
        assert pieces["tree"] == whole["tree"], text


@needs_node
def test_a_long_answer_is_not_parsed_again_and_again() -> None:
    block = "Some words of a paragraph, in *Markdown*.\n\n- one\n- two\n\n"
    text = block * 400
    (answer,) = render([text[i : i + 8] for i in range(0, len(text), 8)])
    assert answer["parsed"] < 10 * len(text)  # from the beginning each time, it would be a thousand times as much


@needs_node
def test_what_only_nests_does_not_take_for_ever() -> None:
    """Texts on which recursive or backtracking parsers fail: `render` has a limit of time."""
    texts = [
        "> " * 20_000 + "a",
        "[" * 50_000,
        "*a_ " * 20_000,
        "`" * 30_000,
        "- " * 5_000,
        "<" * 50_000,
        "![" * 30_000,
    ]
    assert len(render(*([text] for text in texts))) == len(texts)


def test_the_library_is_as_it_was_published() -> None:
    """Of npm's markdown-it 15.0.3: package/dist/browser/markdown-it.esm.min.mjs and package/LICENSE."""
    digests = {
        "markdown-it.esm.min.mjs": "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30",
        "markdown-it.LICENSE.txt": "792c48c5a849a15fdf9e37e8bcf9e6d1dd13b32b46c642a748a0a46a9919d473",
    }
    for name, digest in digests.items():
        assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
