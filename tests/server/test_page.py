"""The page at /: its files, its policy, its numbers; and in headless Chromium, where there is one, what it does."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, browser
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from test_over_tcp import served

import aengine.server.page
from aengine.server import create_app
from aengine.server.http import HTTPError
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM, FakeRequest, Reply

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(aengine.server.page.__file__).with_name("files.py")
STATIC = FILES.with_name("static")
NAMES = sorted(path.name for path in STATIC.iterdir())


def http_client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(app), base_url="http://engine")


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_the_page_and_its_files_need_no_key(prefix: str) -> None:
    async with FakeAsyncLLM("yes") as engine:
        app = create_app(engine, api_keys="secret")
        async with http_client(Starlette(routes=[Mount(prefix, app)]) if prefix else app) as client:
            page = await client.get(f"{prefix}/")
            assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
            policy = page.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
            assert policy.endswith("require-trusted-types-for 'script'; trusted-types 'none'")
            links = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
            assert {link.rpartition("/")[2] for link in links} < set(NAMES) and len(links) == 3
            for path in (*links, *(f"page/{name}" for name in NAMES)):
                assert not path.startswith(("/", "http"))
                file = await client.get(f"{prefix}/{path}")
                assert file.status_code == 200 and file.content == (STATIC / path.rpartition("/")[2]).read_bytes()
                assert (
                    file.headers["cache-control"] == "no-cache" and file.headers["x-content-type-options"] == "nosniff"
                )
                known = await client.get(f"{prefix}/{path}", headers={"if-none-match": file.headers["etag"]})
                assert known.status_code == 304 and not known.content
            for path in ("page/nothing.js", "page/..%2Ffiles.py", "page/"):
                assert (await client.get(f"{prefix}/{path}")).status_code == 404
            assert (await client.get(f"{prefix}/stats")).status_code == 401


async def test_files_that_an_installer_has_linked(tmp_path: Path) -> None:
    for path in (FILES, *STATIC.iterdir()):
        link = tmp_path / path.relative_to(FILES.parent)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(path)
    (tmp_path / "outside.js").touch()
    spec = importlib.util.spec_from_file_location("aengine.server.page.linked", tmp_path / FILES.name)
    assert spec is not None and spec.loader is not None
    linked = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linked)
    scope = {"type": "http", "method": "GET", "headers": [], "path_params": {"name": "page.js"}}
    assert (await linked.show_file(None, Request(scope))).status_code == 200
    with pytest.raises(HTTPError):
        await linked.show_file(None, Request({**scope, "path_params": {"name": "../outside.js"}}))


async def test_the_page_can_be_left_out() -> None:
    async with FakeAsyncLLM("yes") as engine, http_client(create_app(engine, page=False)) as client:
        for path in ("/", "/page/page.js", "/stats"):
            assert (await client.get(path)).status_code == 404


async def test_the_engine_in_numbers() -> None:
    async with FakeAsyncLLM("abc") as engine:
        async with http_client(create_app(engine)) as client:
            await engine.generate("hello")
            stats = (await client.get("/stats")).json()
            assert (stats["model"], stats["state"]) == ("fake", "running")
            assert (stats["num_running"], stats["generated_tokens"], stats["prompt_tokens"]) == (0, 4, 5)
            assert stats["num_blocks"] == stats["num_free_blocks"] > 0
            assert (stats["max_model_len"], stats["device"], stats["sampling_defaults"]) == (32768, "none", {})
            assert stats["inter_token_latency"]["count"] == 3 and stats["time_to_first_token"]["count"] == 1
            await engine.aclose()
            assert (await client.get("/stats")).status_code == 503


def test_nothing_comes_from_elsewhere_and_nothing_is_put_in_as_html() -> None:
    for path in STATIC.iterdir():
        if path.name.startswith("markdown-it."):  # of which test_page_markdown.py says whose it is
            continue
        text = path.read_text()
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "document.write" not in text
        assert not set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}, path
        assert "style=" not in text and not re.search(r"\son[a-z]+=", text), f"{path}: its policy forbids that"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(("js", ".mjs"))])
def test_the_scripts_parse(name: str, tmp_path: Path) -> None:
    module = tmp_path / "module.mjs"
    module.write_bytes((STATIC / name).read_bytes())
    done = subprocess.run(["node", "--check", str(module)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_has_the_files(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "aengine", tmp_path / "aengine", ignore=shutil.ignore_patterns("__pycache__"))
    command = "import setuptools.build_meta as b; b.build_wheel('wheels')"
    done = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"aengine/server/page/static/{name}" for name in NAMES} <= packed


HOSTILE = "<img src=x onerror=\"document.title='caught'\"><script>document.title='caught'</script> & so on"
TOOLS = '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)


def reply(request: FakeRequest) -> Any:
    if request.params.structured_output:
        return {"a": 1}
    if request.text == "go on":
        return "x" * 100_000
    if request.tools and request.messages and request.messages[-1]["role"] == "user":
        return Reply("Let me look.", tool_calls=[("get_weather", {"city": HOSTILE})])
    return Reply(HOSTILE + request.text, reasoning=HOSTILE)


async def settled(engine: FakeAsyncLLM) -> None:
    while engine.statistics().num_running:
        await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_in_a_browser(tmp_path: Path) -> None:
    async with FakeAsyncLLM(reply, reasoning=True) as engine, served(engine, api_keys="schlüssel 🔑") as port:
        async with browser(tmp_path / "profile") as page:
            await page.open(f"http://127.0.0.1:{port}/")
            # Without a key nothing can be sent, and nothing is an error yet; the field goes when a key is accepted.
            await page.until("!document.querySelector('#key-box').hidden")
            errors = "[...document.querySelectorAll('.error, .bad')].map(e => e.textContent).join('')"
            assert await page.evaluate(errors) == ""
            await page.type("#prompt", "too early")
            await page.press("Enter", 13)
            assert await page.evaluate("document.activeElement.id") == "key"
            assert await page.evaluate("document.querySelector('#send').disabled")
            await page.type("#key", "wrong €")
            await page.press("Enter", 13)
            await page.until("document.querySelector('#key-error').textContent !== ''")
            assert await page.evaluate(errors) == "The server does not accept this key."
            await page.evaluate("document.querySelector('#key').value = ''")
            await page.type("#key", "schlüssel 🔑")
            await page.press("Enter", 13)
            await page.until("document.querySelector('#model').textContent === 'fake'")
            await page.until("document.querySelector('#state').textContent === 'ready'")
            assert await page.evaluate("document.querySelector('#key-box').hidden") and not engine.requests
            assert await page.evaluate("document.querySelector('#prompt').value") == "too early"
            await page.evaluate("document.querySelector('#prompt').value = ''")
            page.problems.clear()  # the key was asked for by 401
            assert "32,768 tokens" in await page.evaluate("document.querySelector('#welcome').textContent")

            # An answer, with its reasoning folded. What the model says stays text.
            await page.type("#prompt", "hello")
            await page.press("Enter", 13)
            await page.until("document.querySelectorAll('.facts').length === 1")
            assert await page.evaluate("document.querySelector('.assistant > .text').textContent") == HOSTILE + "hello"
            assert await page.evaluate("document.querySelector('.reasoning').open") is False
            assert HOSTILE in await page.evaluate("document.querySelector('.reasoning .text').textContent")
            assert await page.evaluate("document.querySelectorAll('#log img, #log script').length") == 0
            assert "caught" not in await page.evaluate("document.title")

            # Stopping ends the request.
            await page.type("#prompt", "go on")
            await page.press("Enter", 13)
            await page.until("document.querySelector('.busy > .text')?.textContent.length > 10")
            assert engine.statistics().num_running == 1
            await page.press("Escape", 27)
            await settled(engine)
            assert engine.statistics().num_aborted == 1
            await page.until("document.querySelectorAll('.facts').length === 2")

            # A tool is called, and its result given back.
            await page.type("#tools", TOOLS)
            await page.type("#prompt", "weather?")
            await page.press("Enter", 13)
            await page.until("document.querySelector('.results') !== null")
            assert HOSTILE.replace('"', '\\"') in await page.evaluate(
                "document.querySelector('.call .text').textContent"
            )
            await page.type(".call textarea", "sunny")
            await page.evaluate("document.querySelector('.results button').click()")
            await page.until("document.querySelectorAll('.facts').length === 4")
            assert engine.requests[-1].messages and engine.requests[-1].messages[-1]["content"] == "sunny"

            # A schema; first one that is no JSON.
            await page.type("#schema", "{")
            await page.type("#prompt", "as JSON")
            await page.press("Enter", 13)
            await page.until("document.querySelector('#schema-error').textContent !== ''")
            await page.evaluate("document.querySelector('#schema').value = document.querySelector('#tools').value = ''")
            await page.type("#schema", SCHEMA)
            await page.evaluate("document.querySelector('#send').click()")
            await page.until("document.querySelectorAll('.facts').length === 5")
            assert await page.evaluate("[...document.querySelectorAll('pre')].at(-1).textContent") == '{\n  "a": 1\n}'

            # The graphs have points.
            await page.until("document.querySelector('.graph .line').getAttribute('d').includes('L')")
            assert page.problems == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_under_a_prefix_and_on_a_phone(tmp_path: Path) -> None:
    async with FakeAsyncLLM("yes " * 200) as engine, served(engine, prefix="/llm") as port:
        async with browser(tmp_path / "profile") as page:
            await page.open(f"http://127.0.0.1:{port}/llm/", width=360, height=640, dark=True)
            await page.until("document.querySelector('#model').textContent === 'fake'")
            await page.type("#prompt", "hello")
            await page.press("Enter", 13)
            await page.until("document.querySelectorAll('.facts').length === 1")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360
            assert await page.evaluate("getComputedStyle(document.querySelector('#side')).display") == "none"
            await page.evaluate("document.querySelector('#panel').click()")
            assert await page.evaluate("document.querySelector('#side').getBoundingClientRect().width") <= 360
            assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
            assert page.problems == []


MARKDOWN = """# Title

Some **bold** text[^1], <b>no HTML</b>, [a link](https://a.org/), [none](javascript:alert(1)), ![](https://a.org/x.png).

```python
print("hello")
```
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_markdown_code_and_examples(tmp_path: Path) -> None:
    async with FakeAsyncLLM(MARKDOWN) as engine, served(engine) as port:
        async with browser(tmp_path / "profile") as page:
            await page.open(f"http://127.0.0.1:{port}/")
            await page.until("!!document.querySelector('.examples button')?.offsetParent")
            send = "JSON.stringify(document.querySelector('#send').getBoundingClientRect())"
            before = await page.evaluate(send)
            await page.evaluate("document.querySelector('.examples button').click()")
            await page.until("document.querySelectorAll('.facts').length === 1")
            assert await page.evaluate(send) == before
            assert engine.requests[-1].text == "Name the capital of France."
            assert engine.requests[-1].params.temperature == 0  # this model brings no parameters of its own
            text = "document.querySelector('.last')"
            assert await page.evaluate(f"{text}.querySelector('h3').textContent") == "Title"
            assert await page.evaluate(f"{text}.querySelectorAll('img, b, script').length") == 0
            links = f"[...{text}.querySelectorAll('a')].map(a => a.href).join(' ')"
            assert await page.evaluate(links) == "https://a.org/ https://a.org/x.png"
            granted = ["clipboardReadWrite", "clipboardSanitizedWrite"]
            await page.send("Browser.grantPermissions", permissions=granted)
            await page.evaluate("document.querySelector('.copy').click()")
            await page.until("document.querySelector('.copy').textContent === 'Copied'")
            assert await page.evaluate("navigator.clipboard.readText()") == 'print("hello")'
            # Text that is read as HTML is refused by the browser, whoever wrote it.
            refused = "(() => { try { document.body.innerHTML = '<b>'; } catch { return true; } })()"
            assert await page.evaluate(refused) is True
            page.problems.clear()
            # A server that is gone is said in plain words, and the message can be sent again.
            await engine.aclose()
            await page.type("#prompt", "hello?")
            await page.press("Enter", 13)
            await page.until("document.querySelector('.failed') !== null")
            said = await page.evaluate("document.querySelector('.failed .error').textContent")
            assert said == "The model is not available: the server is shutting down, or starting again."
            assert await page.evaluate("[...document.querySelectorAll('.again')].map(b => b.textContent)") == [
                "Try again"
            ]


ERRORS = [
    ({}, 0, "The server can't be reached. It may have been stopped, or the network is down."),
    ({"code": "engine_overloaded"}, 429, "The server is busy: its queue is full. Try again in a moment."),
    (
        {"code": "context_length_exceeded", "message": "9000 tokens"},
        400,
        "This chat is longer than the model can read. Begin a new chat, or ask for less at once.",
    ),
    ({"code": "invalid_value", "message": "top_p must be at most 1"}, 400, "top_p must be at most 1"),
    (None, 502, "The server can't be reached. It may have been stopped, or the network is down."),
    (None, 500, "Something went wrong in the server. Its log says what."),
]
CALLS = r"""
import { readFileSync } from "node:fs";
globalThis.sessionStorage = { getItem: () => null };
const { getJSON, streamChat } = await import(process.argv[2]);
const said = [];
for (const [error, status] of JSON.parse(readFileSync(0))) {
  globalThis.fetch = async () => {
    if (status === 0) throw new TypeError("Failed to fetch");
    return new Response(error && JSON.stringify({ error }), { status });
  };
  await getJSON("stats").catch((problem) => said.push(problem.message));
}
globalThis.fetch = async () => new Response('data: {"choices": []}\n\n');
try {
  for await (const chunks of streamChat({})) said.push(chunks.length);
} catch (problem) {
  said.push(problem.message);
}
console.log(JSON.stringify(said));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_errors_are_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "calls.mjs").write_text(CALLS)
    shutil.copy(STATIC / "api.js", tmp_path / "api.mjs")
    given = json.dumps([[error, status] for error, status, _ in ERRORS])
    command = ["node", "calls.mjs", str(tmp_path / "api.mjs")]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lost = "The connection was lost before the answer was complete."
    assert json.loads(done.stdout) == [*(said for _, _, said in ERRORS), 1, lost]
