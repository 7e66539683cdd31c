"""What torch registers for the device "meta" is postponed in a worker on a CPU, and there for who needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

BEGIN = """
import json, sys
from aengine.config import EngineConfig
from aengine.runner.startup import begin, meta_kernels
from aengine.workers.rank import Rank

class Load(type(sys)):
    # In place of load.py, which imports torch.

    @property
    def load_model(self):
        import torch
        return lambda *arguments: None

sys.modules["aengine.runner.startup.load"] = Load("load")

def start(extension=None):
    config = EngineConfig(model="tiny", device="cpu", worker_extension=extension)
    begin.load_model(config, {}, Rank(device="cpu"), print)

def are_postponed():
    return [isinstance(sys.modules[name], meta_kernels._Postponed) for name in meta_kernels._MODULES]
"""


def outcome(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_worker_on_a_cpu_registers_no_meta_kernels() -> None:
    """The finder is gone then, and what torch computes is what it computed."""
    before, postponed, total = outcome("""
before = list(sys.meta_path)
start()
import torch
print(json.dumps([before == sys.meta_path, are_postponed(), torch.arange(4.0).square().sum().item()]))
""")
    assert (before, postponed, total) == (True, [True, True], 14.0)


@pytest.mark.parametrize("how", ["register", "attribute"])
def test_they_are_registered_for_who_needs_them(how: str) -> None:
    """An op whose shape only Python knows, the compiler's tensors, and modules like any other."""
    ask = "meta_kernels.register_meta_kernels()" if how == "register" else "torch._meta_registrations.meta_table"
    shape, fake, postponed, file = outcome(f"""
start()
import torch
try:
    {ask}
except AttributeError:
    pass
x = torch.empty(3, 8, device="meta", dtype=torch.int8)
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    fake = torch.nn.functional.scaled_dot_product_attention(*[torch.empty(1, 2, 5, 16)] * 3).shape
print(json.dumps([torch._int_mm(x, x.t()).shape, fake, are_postponed()[0], torch._meta_registrations.__file__]))
""")
    assert (shape, fake, postponed) == ([3, 3], [1, 2, 5, 16], False)
    assert file.endswith("_meta_registrations.py")


def test_an_extension_has_all_of_torch() -> None:
    assert outcome("""
start(extension="some.module:Extension")
print(json.dumps(are_postponed()))
""") == [False, False]
