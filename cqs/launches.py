"""Launches of Triton kernels that skip Triton's checks of arguments like those of earlier launches.

Triton examines all arguments in every launch, to find the code that was compiled for them. For a
short attention call that took the host longer than everything else together.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager

Arguments = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""The grid of a launch, its positional and its keyword arguments."""


class _WriteOnly(FileCacheManager):
    """A cache of compiled kernels that finds none."""

    def get_file(self, filename: str) -> None:
        return None

    def get_group(self, filename: str) -> None:
        return None


class _Prepared(NamedTuple):
    """A launch, except for its tensors."""

    compiled: Any
    """Triton's ``CompiledKernel``."""
    grid: tuple[int, ...]
    """Number of programs in each of three dimensions."""
    arguments: list[Any]
    """All arguments in the order of the kernel's parameters, None where tensors differ."""
    tensors: list[tuple[int, int | slice]]
    """Indices of arguments, each with those of its tensor or tuple of tensors."""
    descriptors: list[tuple[int, int, Any]]
    """Indices of arguments, each with that of its tensor, and a descriptor like it."""
    kept: Sequence[Tensor]
    """Tensors of the signature, whose identity no other tensor may take on."""


class Launcher:
    """Launches a Triton kernel; later launches of the same signature bind nothing but tensors.

    The signature consists of the key, the kept tensors, and shape, strides, dtype, alignment and
    device of all other tensors. These determine the compiled code and all other arguments.
    """

    def __init__(self, kernel: Any, most: int = 256) -> None:
        """Launch a kernel that was decorated with ``triton.jit`` or ``gluon.jit``.

        Args:
            kernel: The kernel.
            most: Number of launches that are prepared at most; each holds its kept tensors.
        """
        self._kernel = kernel
        self._most = most
        self._prepared: dict[Any, _Prepared] = {}

    def launch(
        self,
        tensors: tuple[Tensor, ...],
        make: Callable[..., Arguments],
        *,
        key: Any = None,
        kept: Sequence[Tensor] = (),
    ) -> None:
        """Launch the kernel on the current stream of the tensors' device, which must be current.

        Args:
            tensors: CUDA tensors that differ from launch to launch.
            make: Returns the arguments of the launch for these tensors. They contain a tensor as it
                is, in a descriptor for TMA, or in a tuple of adjacent elements of ``tensors``. A
                launch with other tensors, such as copies, is not prepared.
            key: All other inputs of ``make``; hashable.
            kept: Further tensors that the arguments contain, identified by identity.
        """
        device = tensors[0].device
        signature = (
            device,
            key,
            *map(id, kept),
            *[(t.shape, t.stride(), t.dtype, t.data_ptr() % 16) for t in tensors],
        )
        prepared = self._prepared.get(signature)
        if prepared is None:
            self._launch_first(signature, tensors, make, kept)
            return
        compiled, grid, template, tensor_places, descriptor_places, _ = prepared
        arguments = template.copy()
        for i, which in tensor_places:
            arguments[i] = tensors[which]
        for i, number, like in descriptor_places:
            arguments[i] = descriptor = object.__new__(type(like))  # its checks have passed before
            descriptor.__dict__.update(like.__dict__, base=tensors[number])
        # As triton.JITFunction.run does it, and also the code that torch.compile generates.
        stream = driver.active.get_current_stream(device.index)
        enter: Any = triton.knobs.runtime.launch_enter_hook
        leave: Any = triton.knobs.runtime.launch_exit_hook
        metadata = None
        if enter.calls or leave.calls:  # a profiler
            metadata = compiled.launch_metadata(grid, stream, *arguments)
        else:
            enter = leave = None
        kernel = compiled.function, compiled.packed_metadata
        compiled.run(*grid, stream, *kernel, metadata, enter, leave, *arguments)

    def _launch_first(
        self,
        signature: Any,
        tensors: tuple[Tensor, ...],
        make: Callable[..., Arguments],
        kept: Sequence[Tensor],
    ) -> None:
        """Launch as usual, and prepare further launches of the signature if that is possible."""
        # New objects, because one tensor may be passed as two of them, such as query and key.
        aliases = tuple([tensor.detach() for tensor in tensors])
        grid, positional, named = make(*aliases)
        try:
            compiled = self._kernel[grid](*positional, **named)
        except Exception:
            if not hasattr(self._kernel, "device_caches"):
                raise  # Triton interprets the kernel
            self._kernel.device_caches.clear()
            with triton.knobs.cache.scope():  # its files on disk may be damaged: write new ones
                triton.knobs.cache.manager_class = _WriteOnly
                compiled = self._kernel[grid](*positional, **named)
        if getattr(compiled, "function", None) is None:
            return  # Triton interprets the kernel, or has only compiled it
        names = self._kernel.arg_names[len(positional) :]
        arguments = [*positional, *(named[name] for name in names)]
        numbers = {id(alias): number for number, alias in enumerate(aliases)}
        kept_ids = set(map(id, kept))
        tensor_places: list[tuple[int, int | slice]] = []
        descriptor_places = []
        for i, argument in enumerate(arguments):
            if isinstance(argument, tuple) and argument and isinstance(argument[0], Tensor):
                first = numbers.get(id(argument[0]), len(aliases))
                which = slice(first, first + len(argument))
                if tuple(map(id, aliases[which])) != tuple(map(id, argument)):
                    return
                tensor_places.append((i, which))
            elif isinstance(base := getattr(argument, "base", argument), Tensor):
                if id(base) in kept_ids:
                    continue
                if (number := numbers.get(id(base))) is None:
                    return
                if base is argument:
                    tensor_places.append((i, number))
                else:
                    argument.base = None
                    descriptor_places.append((i, number, argument))
            else:
                continue
            arguments[i] = None  # frees its memory
        if len(self._prepared) >= self._most:
            self._prepared.pop(next(iter(self._prepared)), None)
        whole_grid = *grid, *(1, 1, 1)[len(grid) :]
        self._prepared[signature] = _Prepared(
            compiled, whole_grid, arguments, tensor_places, descriptor_places, kept
        )
