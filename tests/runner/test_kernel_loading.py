"""Compiled kernels are loaded before the first step launches them, by several threads."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from aengine.kernels.triton import launch

SOURCE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "__test_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___test_launcher(void) { return PyModule_Create(&definition); }
"""


def test_kernels_are_loaded_by_the_threads_that_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    devices: list[int] = []
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)

    class Kernel:
        loaded_by = ""

        def __getitem__(self, grid: tuple[int, ...]) -> None:
            self.loaded_by = threading.current_thread().name
            raise RuntimeError("it is too large for this GPU")

    kernels: list[Kernel] = []
    with launch._compilers() as pool, launch._CompileAndLoad(pool, 1) as mode:
        mode.submit("kernel", Kernel, kernels.append)
    (kernel,) = kernels
    assert kernel.loaded_by.startswith("compile")
    assert devices == [2]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="compiles C")
def test_what_launches_a_kernel_stays_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also when the launcher of another kernel, of the same name, is loaded a second time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def launcher(number: int) -> Any:
        return launch.build.compile_module_from_src(SOURCE % number, "__test_launcher")

    with launch._loading_apart():
        launchers = [launcher(number) for number in (1, 2, 1)]
        assert [module.launch() for module in launchers] == [1, 2, 1]
