"""xgrammar's compiler in a process of its own, which can be killed, and its C++ module without torch.

    host, a pool thread                                        child: this file, run by path
    CompilerProcess ──frame: vocabulary, once; a grammar──>    main ── C++ compile
         │          <──frame: serialised grammar, or error──     │
         └─ kill, when it takes too long                         └─ guard thread: ends it with the host

A compile takes seconds for some schemas and can't be stopped inside a process. A frame is its length in 4 bytes, then
msgpack.

`load_core`: ``import xgrammar`` pulls in torch, transformers and triton (2.4 s, 280 MB), though only its kernels for
tensors need them; the host half of aengine never imports torch. So only its submodule of C++ bindings is imported,
under another name (0.3 s, 44 MB), while a finder makes ``import torch`` fail *in this thread*, because apache-tvm-ffi
imports torch too where it can. Nothing changes for other threads, and a later ``import xgrammar`` of the host's own
works. The bindings' signatures are not xgrammar's public interface: hence the narrow range of versions allowed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import queue
import select
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["CompileTimeoutError", "CompilerProcess", "load_core", "tokenizer_info"]

_LENGTH = struct.Struct("<I")
_PRIVATE_NAME = "_aengine_xgrammar"


class CompileTimeoutError(Exception):
    """The child took too long, and was killed."""


class _WithoutTorch:
    """A finder by which one thread finds no torch, unless it is loaded already."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is left out on purpose", name=name)


@functools.cache
def load_core() -> Any:
    """The C++ classes of xgrammar. Raises ImportError when it is not installed, or not of a known version."""
    loaded = sys.modules.get("xgrammar.base")
    if loaded is not None and getattr(loaded, "_core", None) is not None:
        return loaded._core
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("xgrammar is not installed", name="xgrammar")
    package = types.ModuleType(_PRIVATE_NAME)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[_PRIVATE_NAME] = package
    finder = _WithoutTorch()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(f"{_PRIVATE_NAME}.load_binding")
        return importlib.import_module(f"{_PRIVATE_NAME}.base")._core
    finally:
        sys.meta_path.remove(finder)


def tokenizer_info(core: Any, token_bytes: Sequence[bytes], vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The vocabulary as xgrammar has it; equal arguments in host and child make what is serialised fit."""
    raw_bytes = 0
    return core.TokenizerInfo(list(token_bytes), raw_bytes, vocab_size, list(eos_ids), False)


class CompilerProcess:
    """One child. For one thread at a time, but `kill` may come from any."""

    def __init__(self, vocabulary: dict[str, Any]) -> None:
        """Starts it without waiting until it is ready. Raises OSError."""
        search_path = [str(Path(__file__).parents[2]), *(folder for folder in sys.path if os.path.isabs(folder))]
        command = [_interpreter(), "-P", __file__, str(os.getpid()), os.pathsep.join(search_path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._vocabulary: dict[str, Any] | None = vocabulary  # to be sent first

    def start(self, timeout: float) -> None:
        """Wait until it is ready: it imports the library and reads the vocabulary. Raises as `compile` does."""
        if self._vocabulary is not None:
            self._ask(self._vocabulary, timeout)
            self._vocabulary = None

    def compile(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The child's answer. Raises CompileTimeoutError, or EOFError when it died; then it is of no more use."""
        return self._ask(request, timeout)

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        try:
            self._send(message, deadline)
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
            answer: dict[str, Any] = _unpack(self._receive(length, deadline))
            return answer
        except (OSError, ValueError) as error:  # ValueError: its pipes were closed by kill() meanwhile
            raise EOFError(f"the compiler process is gone: {error}") from error

    def kill(self) -> None:
        """At once; the rest, which may take a moment, in a thread. May be called twice."""
        self._process.kill()
        try:
            threading.Thread(target=self._bury, name="aengine-grammar-reaper", daemon=True).start()
        except RuntimeError:  # no thread to be had, as when the interpreter ends
            self._bury()

    def _bury(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was in it has nowhere to go
                    pass

    def _send(self, message: dict[str, Any], deadline: float) -> None:
        assert self._process.stdin is not None
        data = memoryview(_frame(message))
        fd = self._process.stdin.fileno()
        os.set_blocking(fd, False)
        while data:
            _wait(fd, select.POLLOUT, deadline)
            data = data[os.write(fd, data) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        data = bytearray()
        fd = self._process.stdout.fileno()
        while len(data) < size:
            _wait(fd, select.POLLIN, deadline)
            part = os.read(fd, size - len(data))
            if not part:
                raise EOFError(f"the compiler process ended with code {self._process.poll()}")
            data += part
        return bytes(data)


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()  # unlike select(), it takes any descriptor
    poll.register(fd, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise CompileTimeoutError


def _interpreter() -> str:
    """A Python of the host's installation: sys.executable, unless the host is a program that embeds Python."""
    if os.path.basename(sys.executable or "").startswith("python"):
        return sys.executable
    return os.path.join(sys.exec_prefix, "bin", "python3")


def _frame(message: dict[str, Any]) -> bytes:
    import msgpack

    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


def _unpack(body: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(body, strict_map_key=False)


# -- the child


def _main(host_pid: int) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else may write between frames
    noise = os.memfd_create("xgrammar-warnings")
    os.dup2(noise, 2)  # the library says only on stderr what it does not enforce
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_guard, args=(host_pid, requests), daemon=True).start()
    core = load_core()
    first = requests.get()  # the vocabulary
    info = tokenizer_info(core, first["token_bytes"], first["vocab_size"], first["eos_ids"])
    compiler = core.GrammarCompiler(info, 1, False, -1)
    _answer(answers, {})
    while True:
        request = requests.get()
        os.ftruncate(noise, 0)
        os.lseek(noise, 0, os.SEEK_SET)
        try:
            text = str(_compile(compiler, request).serialize_json())
            answer = {"grammar": text, "warnings": os.pread(noise, 1 << 16, 0).decode(errors="replace")}
        except Exception as error:
            answer = {"error": str(error)}
        _answer(answers, answer)


def _answer(answers: IO[bytes], answer: dict[str, Any]) -> None:
    answers.write(_frame(answer))
    answers.flush()


def _compile(compiler: Any, request: dict[str, Any]) -> Any:
    kind, text = request["kind"], request["text"]
    if kind == "json_schema":
        compact = request["whitespace"] == "compact"
        # indent, separators, strict_mode (no properties beside the named), blanks at most, properties in any order
        return compiler.compile_json_schema(
            text, not compact, None, (", ", ": ") if compact else None, False, None, False
        )
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "lark":
        return compiler.compile_lark(text, [], [])
    if kind == "choice":
        text = "root ::= " + " | ".join(map(_ebnf_string, json.loads(text)))
    return compiler.compile_grammar_from_strings(text, "root")


def _ebnf_string(text: str) -> str:
    letters = (f"\\x{ord(c):02x}" if c < " " or c == "\x7f" else "\\" + c if c in '"\\' else c for c in text)
    return '"' + "".join(letters) + '"'


def _guard(host_pid: int, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Reads requests; ends the process, whatever it is doing, when the host closes the pipe or is gone."""
    with os.fdopen(0, "rb", buffering=0) as source:
        try:
            while True:
                (length,) = _LENGTH.unpack(_read(source, _LENGTH.size, host_pid))
                requests.put(_unpack(_read(source, length, host_pid)))
        except BaseException:
            os._exit(0)


def _read(source: IO[bytes], size: int, host_pid: int) -> bytes:
    data = bytearray()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while len(data) < size:
        while not poll.poll(1000):
            if os.getppid() != host_pid:  # its pipe may be held open by its forks
                raise EOFError
        part = source.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    sys.path[:] = sys.argv[2].split(os.pathsep)
    _main(int(sys.argv[1]))
