"""Later launches of a kernel have the arguments that Triton would have bound."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from triton.knobs import HookChain

import cqs
from cqs import launches
from cqs.launches import Launcher
from cqs.patterns import dilated, documents, from_mask, sliding_window

ROWS = 1040
CALLS = {
    "dense": {},
    "tasks": {"num_tasks": 7, "is_causal": True},
    "documents": {"pattern": documents([0, 31, 590, ROWS])},
    "steps": {"pattern": sliding_window(100) | dilated(ROWS, ROWS, 2)},
    "mask": {"pattern": from_mask(np.random.default_rng(0).random((ROWS, ROWS)) < 0.5)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
}


class Descriptor:
    def __init__(self, base, rows):
        self.base, self.rows = base, rows


class Kernel:
    """A double of a compiled kernel, which notes how it is launched."""

    arg_names = ("query", "described", "both", "table", "rows", "BLOCK")

    def __init__(self):
        self.function, self.first, self.later = "function", [], []

    def __getitem__(self, grid):
        def launch(*arguments, BLOCK, num_warps):
            self.first.append((grid, *arguments, BLOCK))
            return SimpleNamespace(
                function=self.function,
                packed_metadata="metadata",
                launch_metadata=lambda grid, stream, *_: (grid, stream),
                run=lambda *all_arguments: self.later.append(all_arguments),
            )

        return launch


@pytest.fixture
def kernel(monkeypatch):
    driver = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=driver))
    return Kernel()


def launch(launcher, query, key, table, block=16):
    def make(query, key):
        described = key if key.stride(-1) == 1 else key.contiguous()
        rows, options = len(query), {"BLOCK": block, "num_warps": 4}
        return (rows, 2), (query, Descriptor(described, rows), (query, key), table, rows), options

    launcher.launch((query, key), make, key=block, kept=(table,))


def draw(rows=4):
    return torch.randn(rows, 8)


def test_later_launches_bind_their_own_tensors(kernel):
    launcher, table = Launcher(kernel), draw()
    same, (query, key) = draw(), (draw(), draw())
    launch(launcher, same, same, table)  # one tensor as both arguments
    launch(launcher, query, key, table)
    assert len(kernel.first) == len(kernel.later) == 1
    *before, has_query, described, both, has_table, rows, block = kernel.later[0]
    assert before == [4, 2, 1, 7, "function", "metadata", None, None, None]
    assert has_query is query and has_table is table and (rows, block) == (4, 16)
    assert described.base is key and described.rows == 4 and type(described) is Descriptor
    assert both[0] is query and both[1] is key and len(both) == 2


class Damaged(Kernel):
    """A kernel whose files in Triton's cache are damaged."""

    device_caches = {0: "a kernel that cannot be loaded"}

    def __getitem__(self, grid):
        manager = triton.knobs.cache.manager_class
        if manager is None or self.device_caches:
            raise ValueError("Expecting value: line 1 column 1")
        assert manager("AB").get_group("kernel.json") is manager("AB").get_file("x") is None
        return super().__getitem__(grid)


def test_a_kernel_whose_cache_is_damaged_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    kernel = Damaged()
    launch(Launcher(kernel), draw(), draw(), draw())
    assert len(kernel.first) == 1 and triton.knobs.cache.manager_class is None


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_profilers_see_later_launches(kernel, name, monkeypatch):
    hooks = {"launch_enter_hook": HookChain(), "launch_exit_hook": HookChain()}
    hooks[name].add(print)
    for each, chain in hooks.items():
        monkeypatch.setattr(triton.knobs.runtime, each, chain)
    launcher, table = Launcher(kernel), draw()
    for _ in range(2):
        launch(launcher, draw(), draw(), table)
    assert kernel.later[0][6:9] == (((4, 2, 1), 7), *hooks.values())


def test_other_signatures_are_launched_anew(kernel):
    launcher, table = Launcher(kernel), draw()
    offset = torch.randn(33)[1:].view(4, 8)  # not aligned to 16 bytes
    for number, given in enumerate(
        [
            (draw(), draw(), table),
            (draw(), draw(), draw()),
            (draw(), draw(), table, 32),
            (draw(5), draw(), table),
            (draw().double(), draw(), table),
            (draw(), offset, table),
            (torch.randn(4, 16)[:, :8], draw(), table),
            *[(draw(), torch.randn(8, 4).T, table)] * 2,  # copied for the kernel
        ],
        1,
    ):
        launch(launcher, *given)
        assert len(kernel.first) == number and not kernel.later


def test_launches_of_interpreted_kernels_are_not_prepared(kernel):
    launcher, table, kernel.function = Launcher(kernel), draw(), None
    for _ in range(2):
        launch(launcher, draw(), draw(), table)
    assert len(kernel.first) == 2 and not kernel.later


def test_launches_keep_only_the_kept_tensors_and_are_bounded(kernel):
    launcher, table = Launcher(kernel, most=2), draw()
    for block in (16, 32, 64, 64, 32, 16):
        query = draw()
        launch(launcher, query, query, table, block)
    assert [block for *_, block in kernel.first] == [16, 32, 64, 16]
    assert [arguments[-1] for arguments in kernel.later] == [64, 32]
    storage = StorageWeakRef(query.untyped_storage())
    del query
    kernel.first.clear()
    assert storage.expired()


def draw_call(dtype, layout):
    """Draw query, key and value: tensors of their own, views of a packed one, or not aligned."""
    if layout == "packed":
        packed = torch.randn(2, ROWS, 12, 64, dtype=dtype, device="cuda").transpose(1, 2)
        return packed.split((8, 2, 2), dim=1)
    offset = int(layout == "unaligned")
    numbers = [torch.randn(2 * n * ROWS * 64 + offset, device="cuda") for n in (8, 2, 2)]
    return [each.to(dtype)[offset:].view(2, -1, ROWS, 64) for each in numbers]


def run_call(tensors, options):
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    output = cqs.attention(*tensors, backend="triton", **options)
    return output.detach(), *torch.autograd.grad(output, tensors, torch.ones_like(output))


def launch_anew(self, tensors, make, *, key=None, kept=()):
    grid, positional, named = make(*tensors)
    self._kernel[grid](*positional, **named)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "packed", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_later_calls_are_bitwise_identical_to_calls_by_triton(name, dtype, layout, monkeypatch):
    options, calls = CALLS[name], [draw_call(dtype, layout) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "launch", launch_anew)
        expected = [run_call(tensors, options) for tensors in calls]
    run_call([calls[0][0], *calls[0][1:2] * 2], options)  # one tensor as key and value
    run_call(calls[0], options)
    if layout != "unaligned" and name != "dropout":
        monkeypatch.delattr(Launcher, "_launch_first")
    for tensors, of_call in zip(calls, expected, strict=True):
        assert all(map(torch.equal, run_call(tensors, options), of_call))
