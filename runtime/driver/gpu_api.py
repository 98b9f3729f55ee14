"""A GPU driver library through ctypes: functions by one table of names, every return code checked.

CUDA and HIP have the same calls under other names. A table maps the short names that the driver
uses to a library's symbol and the kinds of its parameters; what differs in more than the name is a
method of `Api`, which `cuda_api` and `hip` fill in.
"""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any, ClassVar

from k3c.errors import DeviceFault

Symbols = Mapping[str, tuple[str, str]]  # short name -> (symbol, one letter for each parameter)
PARAMETERS = {
    "p": c_void_p,  # a pointer, a handle or a device address
    "z": c_size_t,
    "i": c_int,
    "u": ctypes.c_uint,
    "c": ctypes.c_ubyte,
    "l": ctypes.c_ulonglong,
}
GIB = 2**30


class Api(ABC):
    """The functions of one driver library.

    Attributes:
        library: File name of the library.
        override: Environment variable that names another file; for tests.
        product: What to install when the library is missing.
        symbols: The table.
    """

    library: ClassVar[str]
    override: ClassVar[str]
    product: ClassVar[str]
    symbols: ClassVar[Symbols]

    def __init__(self) -> None:
        """Open the library and bind every function.

        Raises:
            DeviceFault: The library is not there, or too old to have a function.
        """
        name = os.environ.get(self.override) or self.library
        try:
            opened = ctypes.CDLL(name)
        except OSError as exc:
            hint = f"install {self.product}"
            raise DeviceFault(f"cannot open the GPU driver: {exc}", name, hint) from exc
        self.functions = {short: _bind(opened, *spec) for short, spec in self.symbols.items()}

    def call(self, short: str, *args: Any, where: str = "") -> None:
        """Call a function by its short name.

        Args:
            short: Its name in the table.
            args: Its arguments.
            where: What the call is for: a bucket, a kernel, a space.

        Raises:
            DeviceFault: It returned anything but 0.
        """
        code = self.functions[short](*args)
        if code:
            raise self.fault(short, code, where)

    def fault(self, short: str, code: int, where: str) -> DeviceFault:
        """Return what a failed call says: function, code, its name and text, free memory."""
        name, text = (self._error_text(f"error_{kind}", code) for kind in ("name", "text"))
        what = f"{self.symbols[short][0]} failed: {name} ({code}), {text}; {self._memory_text()}"
        return DeviceFault(what, where)

    def created(self, short: str, *args: Any, where: str = "") -> int:
        """Call a function whose first parameter receives a handle or an address; return that."""
        made = c_void_p()
        self.call(short, byref(made), *args, where=where)
        return made.value or 0

    def integer(self, short: str, *args: Any) -> int:
        """Call a function whose first parameter receives an int; return that."""
        found = c_int()
        self.call(short, byref(found), *args)
        return found.value

    def memory_bytes(self) -> tuple[int, int]:
        """Return free and total bytes of the current device."""
        free, total = c_size_t(), c_size_t()
        self.call("memory_info", byref(free), byref(total))
        return free.value, total.value

    def device_name(self, device: int) -> str:
        """Return a device's name for people."""
        text = ctypes.create_string_buffer(256)
        self.call("device_name", text, len(text), device)
        return text.value.decode(errors="replace")

    def _error_text(self, short: str, code: int) -> str:
        found = ctypes.c_char_p()
        # Inside an error already: a code that the library does not know must not hide it.
        if self.functions[short](code, byref(found)) or found.value is None:
            return "unknown error"
        return found.value.decode(errors="replace")

    def _memory_text(self) -> str:
        free, total = c_size_t(), c_size_t()
        if self.functions["memory_info"](byref(free), byref(total)):
            return "the device does not say how much memory is free"
        return f"{free.value / GIB:.2f} of {total.value / GIB:.2f} GiB are free"

    @abstractmethod
    def make_current(self, device: int) -> None:
        """Make a device the calling thread's, for all calls that follow."""

    @abstractmethod
    def release(self, device: int) -> None:
        """Give up what `make_current` took of a device."""

    @abstractmethod
    def prepare(self, function: int, parameters: Sequence[int], shared: int, label: str) -> None:
        """Check a kernel's parameters and allow it its shared memory.

        Args:
            function: Its handle.
            parameters: Bytes of each parameter that it will be given.
            shared: Dynamic shared memory of a block, bytes.
            label: The kernel, for errors.

        Raises:
            ArtifactError: The kernel takes other parameters.
            DeviceFault: The device does not have that much shared memory.
        """

    @abstractmethod
    def kernel_node(self, function: int, launch: Sequence[int], parameters: int) -> Any:
        """Return the structure that describes a kernel node.

        Args:
            function: The kernel's handle.
            launch: Blocks along x, y, z; threads of a block; dynamic shared bytes.
            parameters: Address of an array with the address of each parameter.
        """

    @abstractmethod
    def add_copy(
        self, graph: int, after: Any, count: int, copy: tuple[int, int, int], where: str
    ) -> int:
        """Add a node that copies (to, from, bytes) on the device; return it."""

    @abstractmethod
    def add_early_edge(self, graph: int, before: int, after: int, where: str) -> None:
        """Let a kernel node start while the one before it ends; it waits for that by itself."""

    @abstractmethod
    def instantiate(self, graph: int, describe: Callable[[int], str], where: str) -> int:
        """Make a graph executable.

        Args:
            graph: The graph.
            describe: Names a node of the graph.
            where: The bucket.

        Raises:
            DeviceFault: The driver refuses the graph.
        """


def version_text(number: int, major_unit: int, minor_unit: int) -> str:
    """Return a driver's version number as "12.4"."""
    return f"{number // major_unit}.{number % major_unit // minor_unit}"


def _bind(opened: ctypes.CDLL, symbol: str, parameters: str) -> Callable[..., int]:
    try:
        function = opened[symbol]
    except AttributeError as exc:
        what = f"the GPU driver has no function {symbol}"
        raise DeviceFault(what, opened._name, "install a newer driver") from exc
    function.restype = c_int
    function.argtypes = [PARAMETERS[letter] for letter in parameters]
    return function
