"""`CudaMemory`: virtual memory of an NVIDIA GPU, by the driver's own library."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_ushort, c_void_p, pointer
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import InternalError
from .virtual_memory import VirtualMemory

# cuda.h
_OUT_OF_MEMORY = 2
_HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: it stays where it is
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_AND_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_Properties), c_int],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_ulonglong],
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(_Properties), c_ulonglong],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_ulonglong],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(_Access), c_size_t],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemRelease": [c_uint64],
}


class CudaMemory:
    """See `VirtualMemory`. Nobody but this process sees the memory, and no other device."""

    granularity = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mapped_bytes = 0
        self._handles: dict[int, int] = {}  # memory behind each range, by its first address

    def open(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            getattr(self._driver, name).argtypes = arguments
        self._call("cuInit", 0)
        is_there = c_int()
        self._call("cuDeviceGetAttribute", pointer(is_there), _HAS_VIRTUAL_MEMORY, self._device.index)
        if not is_there.value:
            raise InternalError(f"{self._device} has no virtual memory")
        location = _Location(_ON_DEVICE, self._device.index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_AND_WRITE)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", pointer(granularity), pointer(self._properties), 0)
        self.granularity = granularity.value

    def reserve(self, size: int) -> int:
        address = c_uint64()
        self._call("cuMemAddressReserve", pointer(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int) -> None:
        assert address not in self._handles
        handle = c_uint64()
        self._call("cuMemCreate", pointer(handle), size, pointer(self._properties), 0)
        try:
            self._call("cuMemMap", address, size, 0, handle.value, 0)
            try:
                self._call("cuMemSetAccess", address, size, pointer(self._access), 1)
            except BaseException:
                self._call("cuMemUnmap", address, size)
                raise
        except BaseException:
            self._call("cuMemRelease", handle.value)
            raise
        self._handles[address] = handle.value
        self.mapped_bytes += size

    def unmap(self, address: int, size: int) -> None:
        handle = self._handles.pop(address)
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)
        self.mapped_bytes -= size

    def tensor(self, address: int, size: int) -> Tensor:
        return torch.as_tensor(_Memory(address, size), device=self._device)

    def _call(self, name: str, *args: Any) -> None:
        """Call the driver. Raises torch.OutOfMemoryError, or InternalError for what else it refuses."""
        result = getattr(self._driver, name)(*args)
        if result == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: {self._device} has no memory left")
        if result:
            raise InternalError(f"{name} failed with {result} on {self._device}")


class _Memory:
    """Memory as libraries take it over from each other."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


if TYPE_CHECKING:
    _: type[VirtualMemory] = CudaMemory
