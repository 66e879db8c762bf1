"""Helpers of the tests of buckets and weight groups: an update that keeps the bytes, tensors, and another process."""

import ctypes
import os
import pickle
import struct
import subprocess
import sys
from typing import Any

from llmpy.weights.buckets import ITEM_BYTES, host_bytes, span


class Taken:
    """A stand-in for a WeightUpdate that keeps the written tensors by name."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.groups: dict[str, Any] = {}
        self.checked: list[tuple] = []
        self.written: dict[str, tuple[bytes, str, tuple[int, ...], tuple[int, ...] | None]] = {}

    def check_memory(self, items) -> None:
        self.checked += items

    def write_memory(self, items, on_device) -> None:
        for name, address, dtype, shape, strides in items:
            assert address % ITEM_BYTES[dtype] == 0
            n_bytes = span(shape, strides) * ITEM_BYTES[dtype]
            data = device_bytes(address, n_bytes) if on_device else ctypes.string_at(address, n_bytes)
            self.written[name] = data, dtype, tuple(shape), strides

    def write_shared(self, items) -> None:
        for name, descriptor, offset, dtype, shape, strides in items:
            data = os.pread(descriptor, span(shape, strides) * ITEM_BYTES[dtype], offset)
            self.written[name] = data, dtype, tuple(shape), strides

    def finish(self) -> None:
        pass


def device_bytes(address: int, n_bytes: int) -> bytes:
    """Bytes on the device, allocated by torch."""
    import torch

    class Range:
        __cuda_array_interface__ = {"data": (address, False), "shape": (n_bytes,), "typestr": "|u1", "version": 3}  # noqa: RUF012

    return torch.as_tensor(Range(), device="cuda").cpu().numpy().tobytes()


def raw(tensor: Any) -> bytes:
    """A tensor's bytes, row-major."""
    return host_bytes(tensor.cpu() if hasattr(tensor, "cpu") else tensor).tobytes()


class Process:
    """Another Python that runs a script. Its `send(object)` comes back from `get()`; `go()` lets its `wait()` return."""

    HEAD = """
import os, pickle, struct, sys
_out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
def send(what):
    data = pickle.dumps(what)
    _out.write(struct.pack("=Q", len(data)) + data)
    _out.flush()
def wait():
    return sys.stdin.readline().strip()
"""

    def __init__(self, script: str, *args: object, **environment: str) -> None:
        command = [sys.executable, "-c", self.HEAD + script, *map(str, args)]
        environment = {**os.environ, **environment}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def get(self) -> Any:
        stream = self._process.stdout
        assert stream is not None
        size = stream.read(8)
        assert len(size) == 8, "the other process ended"
        return pickle.loads(stream.read(struct.unpack("=Q", size)[0]))

    def go(self, text: str = "") -> None:
        stream = self._process.stdin
        assert stream is not None
        stream.write(text.encode() + b"\n")
        stream.flush()

    def end(self, kill: bool = False) -> int:
        """Waits for the process; returns its exit status."""
        if kill:
            self._process.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait(60)
        self._process.stdout.close()
        return code

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.end(kill=True)
