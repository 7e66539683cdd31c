"""`Browser`: headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--hide-scrollbars", "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"),
)


class Browser:
    """One page of a running Chromium."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.ensure_future(self._read())
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        """What the page has logged as an error: exceptions, refusals of its policy, files that are not there."""

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": number, "method": method, "params": params, **self._session}).encode())
        self._writer.write(b"\0")
        return await answer

    async def _read(self) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    waiting = self._waiting.pop(message["id"])
                    if "error" in message:
                        waiting.set_exception(RuntimeError(str(message["error"])))
                    else:
                        waiting.set_result(message["result"])
                elif message["method"] == "Runtime.exceptionThrown":
                    self.problems.append(str(message["params"]["exceptionDetails"]))
                elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                    self.problems.append(str(message["params"]["entry"]))
        for waiting in self._waiting.values():
            waiting.set_exception(ConnectionError("the browser has ended"))

    async def open(self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        """Go to a page in a window of its own."""
        self._session = {}
        target = await self.send("Target.createTarget", url="about:blank")
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript."""
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until JavaScript is true."""
        while not await self.evaluate(expression):
            await asyncio.sleep(0.05)

    async def type(self, selector: str, text: str) -> None:
        """Put the focus on a field, and enter a text as if it were pasted."""
        field = f"document.querySelector({json.dumps(selector)})"
        await self.evaluate(f"{field}.closest('details')?.setAttribute('open', '')")
        assert await self.evaluate(f"{field}.focus(), {field} === document.activeElement"), selector
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp") if key == "Enter" else ("rawKeyDown", "keyUp"):
            text = {"text": "\r"} if kind == "char" else {}
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def screenshot(self, path: Path) -> None:
        answer = await self.send("Page.captureScreenshot", format="png")
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._writer.close()
        self._reading.cancel()


@asynccontextmanager
async def browser(profile: Path) -> AsyncIterator[Browser]:
    """Start Chromium with an empty profile in this folder."""
    assert CHROMIUM is not None
    loop = asyncio.get_running_loop()
    its_input, to_it = os.pipe()
    from_it, its_output = os.pipe()
    command = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
    flags = [*_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = await asyncio.create_subprocess_exec(
        *("/bin/bash", "-c", command, CHROMIUM, *flags),
        pass_fds=(its_input, its_output),
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    reader = asyncio.StreamReader(limit=64 << 20)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), open(from_it, "rb", 0))
    writer, _ = await loop.connect_write_pipe(asyncio.Protocol, open(to_it, "wb", 0))
    driver = Browser(reader, writer)
    try:
        yield driver
    finally:
        process.kill()
        driver.close()
        reading.close()
        await process.wait()
