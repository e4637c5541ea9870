"""Functions of the CUDA driver that PyTorch lacks.

The package cuda-bindings has them too, but converts the result of every call to an enumeration,
which takes longer than the call.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

HANDLE_BYTES = 64
"""Size of an IPC handle."""
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_LAZY_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_SIGNATURES = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD32Async": (c_uint64, c_uint32, c_size_t, c_void_p),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}


def is_available() -> bool:
    """Return whether a driver with all these functions is installed."""
    try:
        _driver()
    except (AttributeError, OSError):
        return False
    return True


def allocate(num_bytes: int) -> int:
    """Return the address of new device memory, or 0 if there is too little."""
    address = c_uint64()
    return 0 if _driver().cuMemAlloc_v2(byref(address), num_bytes) else address.value


def free(address: int) -> None:
    """Free device memory that :func:`allocate` returned."""
    _check(_driver().cuMemFree_v2(address))


def find_base(address: int) -> int:
    """Return the address at which the allocation begins that an address is in."""
    base, size = c_uint64(), c_size_t()
    _check(_driver().cuMemGetAddressRange_v2(byref(base), byref(size), address))
    return base.value


def export_memory(base: int) -> bytes:
    """Return the IPC handle of an allocation.

    Raises:
        RuntimeError: The device or the kind of memory supports no handles.
    """
    handle = _Handle()
    _check(_driver().cuIpcGetMemHandle(byref(handle), base))
    return bytes(handle.reserved)


def open_memory(handle: bytes) -> int:
    """Return the address of another process's memory, or 0 if it cannot be accessed."""
    if not any(handle):
        return 0
    address, peer_handle = c_uint64(), _Handle.from_buffer_copy(handle)
    error = _driver().cuIpcOpenMemHandle_v2(byref(address), peer_handle, _LAZY_ACCESS)
    return 0 if error else address.value


def close_memory(address: int) -> None:
    """Close another process's memory; has no effect if that process has ended."""
    _driver().cuIpcCloseMemHandle(address)


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queue a copy between addresses of any GPUs."""
    _check(_driver().cuMemcpyAsync(target, source, num_bytes, stream))


def fill_words(address: int, value: int, number: int, stream: int) -> None:
    """Queue the writing of ``number`` equal words of 32 bits."""
    _check(_driver().cuMemsetD32Async(address, value, number, stream))


def wait_word(stream: int, address: int, least: int) -> None:
    """Make a stream wait until a word of 32 bits is at least ``least``."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, least, _AT_LEAST))


def write_word(stream: int, address: int, value: int) -> None:
    """Queue the writing of a word of 32 bits."""
    _check(_driver().cuStreamWriteValue32_v2(stream, address, value, 0))


def relax_capture() -> None:
    """Allow this thread to query events and streams while another captures a CUDA graph.

    By default such a query invalidates the capture of the other thread.
    """
    _check(_driver().cuThreadExchangeStreamCaptureMode(byref(c_int(_RELAXED))))


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        getattr(library, name).argtypes = types
    return library


def _check(error: int) -> None:
    if error:
        name = c_char_p()
        _driver().cuGetErrorName(error, byref(name))
        text = error if name.value is None else name.value.decode()
        raise RuntimeError(f"a call of the CUDA driver failed with {text}")
