"""Writes what editors and the docs show of all settings, from the classes that define them.

    python scripts/settings.py            # write aengine/settings.py and docs/settings.md
    python scripts/settings.py --check    # exit status 1 if they are not what would be written

`help()` makes what it shows of them by itself; see aengine/settings.py.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aengine.config import EngineConfig  # noqa: E402
from aengine.params import SamplingParams, StructuredOutput  # noqa: E402
from aengine.settings import UNITS, Field, fields_of  # noqa: E402, F401  # UNITS: for the tests

CLASSES = (EngineConfig, SamplingParams, StructuredOutput)
NAMES = {field.name for cls in CLASSES for field in dataclasses.fields(cls)}
MODULE, PAGE = ROOT / "aengine" / "settings.py", ROOT / "docs" / "settings.md"
CLASS_HEAD = "class Settings(TypedDict, total=False):\n"

PAGE_HEAD = """\
# Settings

Written by `scripts/settings.py` from the docstrings of `EngineConfig`, `SamplingParams` and `StructuredOutput`.
`help()` of these classes, of `AsyncLLM` and of `LLM` shows the same, and so do editors where they complete a name.

```python
from aengine import AsyncLLM, EngineConfig

AsyncLLM("smollm2-135m", max_model_len=2048)  # settings by name
config = EngineConfig(model="smollm2-135m", max_model_len=2048)  # or as an object: frozen, checked when it is made
AsyncLLM(config)
AsyncLLM(config, max_num_seqs=64)  # with some settings in place of its own
```

`LLM` takes the same; its `own_thread` is always on, and `admission` is "wait" unless given by name. An unknown name and
a wrong value raise `InvalidRequestError`, whose `param` is the name. So does a setting that has no effect beside
the others (`kv_cache_scales` without `kv_cache_dtype="fp8"`, `seed` without `load_format="dummy"`). One that the model
or the machine can't follow (`revision` of a folder, `attention_backend` on a CPU) is a `ModelLoadError` from `start()`,
as a rule before a worker is started. Limits that are never reached and permissions that are not needed are no faults.

## On the command line

Commands that start an engine take the settings as options: `aengine run`, `chat`, `bench` and `serve`.

```
aengine run Qwen/Qwen3-0.6B "Write a haiku about rain." --gpu-memory-utilization 0.5
aengine chat meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2
```

* Options are written out: `--max-num-seqs`, not a beginning of it.
* A wrong option, value or prompt ends a command with exit code 2, what is wrong with the model or the engine with 1.
* Values are written as in the environment (below), True and False as `--enforce-eager` and `--no-enforce-eager`.
* No options are functions and objects (`progress`, `on_request_end`, `spare_workers`), `own_thread`, `skip_tokenizer`,
  and of `run` and `chat` the engine's `seed`: their `--seed` is the answer's (`SamplingParams.seed`).

## From the environment

`EngineConfig.from_env()` reads each setting from `AENGINE_` and its name in capitals; another prefix is
`from_env("MYAPP_LLM_")`.

```python
config = EngineConfig.from_env(model="smollm2-135m")  # AENGINE_MAX_NUM_SEQS=64, AENGINE_DTYPE=float32
```

* Arguments come before the environment. AENGINE_MODEL names the model, if no argument does.
* `aengine run`, `chat`, `serve` and `bench` read it too; their options come before it.
* Numbers are written as in Python. True and False: `1` and `0`, `true` and `false`, `yes` and `no`, `on` and `off`.
  None: `none`. An empty variable counts as one that is not set.
* A variable with the prefix that names no setting raises `InvalidRequestError`, with the name that was probably meant;
  so does a value that can't be read. Functions (`progress`, `on_request_end`) are given as arguments.
  Left alone are `AENGINE_API_KEY` and `AENGINE_ADMIN_KEY`, which are `aengine serve`'s, and what Kubernetes sets for
  a service called "aengine" (`AENGINE_SERVICE_HOST`, `AENGINE_PORT_8000_TCP`, ...).

"""


def module() -> str:
    head, _, rest = MODULE.read_text().partition(CLASS_HEAD)
    text = head + CLASS_HEAD + rest.partition("\n\n")[0] + "\n\n"
    for field in fields_of(EngineConfig):
        if field.name != "model":
            text += f"    {field.name}: {field.type}\n"
            unit = f" In {field.unit}." if field.unit and field.unit != "share" else ""
            text += _docstring(f"{field.doc}{unit} Default: {field.default}.")
    return text


def _docstring(text: str) -> str:
    quoted = f'"""{" " if text.startswith(chr(34)) else ""}{text}"""'
    return textwrap.fill(quoted, 120, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False) + "\n"


def page() -> str:
    text = PAGE_HEAD
    text += "## Of an engine\n\n" + "\n".join(_table(fields_of(EngineConfig)))
    text += "\n\n## Of a request: `SamplingParams`\n\n" + "\n".join(_table(fields_of(SamplingParams)))
    text += "\n\n## Of a shape: `StructuredOutput`\n\nExactly one of the first five is given.\n\n"
    return text + "\n".join(_table(fields_of(StructuredOutput))) + "\n"


def _table(fields: list[Field]) -> Iterator[str]:
    yield "| name | type | default | unit | meaning |"
    yield "|---|---|---|---|---|"
    for field in fields:
        kind, default = (f"`{_code(text)}`" if text else "(required)" for text in (field.type, field.default))
        yield f"| `{field.name}` | {kind} | {default} | {field.unit} | {_prose(field.doc)} |"


def _code(text: str) -> str:
    return text.replace("|", r"\|")


def _prose(text: str) -> str:
    """As Markdown shows it, in a table's cell; names of settings that can't be taken for words are code."""
    text = text.replace("`", "").replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    return re.sub(r"\b[a-z]+_\w+\b", lambda name: f"`{name[0]}`" if name[0] in NAMES else name[0], text)


def main() -> int:
    stale = []
    for path, text in ((MODULE, module()), (PAGE, page())):
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if "--check" not in sys.argv:
                path.write_text(text)
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale: run scripts/settings.py' if '--check' in sys.argv else 'written'}")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
