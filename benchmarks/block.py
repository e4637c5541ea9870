"""Time of the parts of a transformer layer, dense and sparse, for every mesh of ranks."""

import argparse
import copy
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.errors import exact_rows, verify_close
from benchmarks.layer_parts import PARTS, time_communication, time_parts
from benchmarks.options import add_common, add_heads
from benchmarks.peers import peak_bytes, time_together, verify_together
from benchmarks.publish import make_columns, make_row, publish
from benchmarks.ranks import join_ranks
from cqs.arguments import as_integer
from cqs.nn import HybridTransformerBlock, reduce_gradients
from cqs.nn.mesh import AXES
from cqs.patterns import Pattern, sliding_window
from cqs.problem import check_problem
from cqs.report.measurement import Measurement, append_rows

_ROWS = 48
"""Number of rows that are compared with float64."""
_WINDOW = 16
"""Tokens divided by the width of the window of the sparse layer."""
_FEED_FORWARD = 4
"""Features of the feed-forward layer divided by those of a token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    add_heads(parser, 8)


def run(
    *,
    tokens: Sequence[int] | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 128,
    repeats: int | None = None,
    out: str | None = None,
) -> None:
    """Verify and time a causal layer on the ranks that torchrun started, or on one device.

    Ranks have one GPU each, or share CPUs. Every mesh of sequence x tensor is timed: tensor
    parallelism alone, sequence parallelism alone, and hybrids. A step is forward, backward and the
    sum of gradients over the ranks. Its time is that of the slowest rank, from a barrier on. The
    time of its parts is measured separately, by events between them. Communication is exposed
    communication only; packing counts as attention.

    Args:
        tokens: Sequence lengths; ``None`` means 16K to 128K, or 1K and 2K on CPUs.
        heads: Number of query heads.
        kv_heads: Number of KV heads; ``None`` means as many as query heads.
        head_dim: Head dimension; the layer has ``heads * head_dim`` features, and four times as
            many in its feed-forward part.
        repeats: Number of repeats; ``None`` means 9, or 3 on CPUs.
        out: File to append rows to, or ``None``.

    Raises:
        ValueError: There are fewer tokens than ranks.
        VerificationError: A result is wrong; raised on every rank.
    """
    for length in tokens or []:
        as_integer("tokens", length, int(os.environ.get("WORLD_SIZE", 1)))
    device = join_ranks()
    on_gpu = device.type == "cuda"
    sizes = {
        "hidden_size": heads * head_dim,
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "feed_forward_size": _FEED_FORWARD * heads * head_dim,
    }
    meshes = make_meshes(dist.get_world_size(), device.type, sizes)
    rows: list[Measurement] = []
    for length in tokens or ([2**14, 2**15, 2**16, 2**17] if on_gpu else [1024, 2048]):
        for pattern in (None, sliding_window(length // _WINDOW, 0)):
            rows += measure(
                meshes, sizes, length, pattern, device, repeats=repeats or (9 if on_gpu else 3)
            )
            append_rows(rows[-len(meshes) :], out)
    if rows:
        publish(rows, make_columns(*(f"{part}_ms" for part in PARTS), "peak_bytes"), None)
    dist.destroy_process_group()


def make_meshes(
    num_ranks: int, device_type: str, sizes: Mapping[str, int]
) -> dict[str, DeviceMesh | None]:
    """Return all meshes of ``num_ranks`` ranks that divide the sizes, by name.

    Every rank calls this. One rank has no mesh; its name is ``one``.
    """
    if num_ranks == 1:
        return {"one": None}
    meshes: dict[str, DeviceMesh | None] = {}
    for tensor in range(num_ranks, 0, -1):
        if num_ranks % tensor == 0 and not any(size % tensor for size in sizes.values()):
            shape = num_ranks // tensor, tensor
            kind = "tensor" if shape[0] == 1 else "sequence" if tensor == 1 else "hybrid"
            name = f"{kind} {shape[0]}x{tensor}"
            meshes[name] = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    return meshes


def measure(
    meshes: Mapping[str, DeviceMesh | None],
    sizes: Mapping[str, int],
    length: int,
    pattern: Pattern | None,
    device: torch.device,
    *,
    repeats: int,
) -> list[Measurement]:
    """Verify and time a layer on meshes of all ranks; every rank calls this.

    Args:
        meshes: Meshes by name; the first is the baseline.
        sizes: Sizes of the layer, by the names of its arguments.
        length: Number of tokens, at least the number of ranks.
        pattern: Pattern of the layer, or ``None``.
        device: Device of this rank.
        repeats: Number of repeats.

    Returns:
        The rows on the first rank, an empty list on the others.

    Raises:
        VerificationError: A result is wrong; raised on every rank.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, length, sizes["hidden_size"]
    hidden, grad = (
        torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(2)
    )

    def make_layer(mesh: DeviceMesh | None) -> HybridTransformerBlock:
        torch.manual_seed(0)
        layer_options: dict[str, Any] = {**sizes, "pattern": pattern, "mesh": mesh}
        return HybridTransformerBlock(**layer_options, device=device, dtype=dtype)

    layers = {name: make_layer(mesh) for name, mesh in meshes.items()}
    expected = _expect(make_layer(None), hidden, grad)
    steps: dict[str, Callable[[], Any]] = {}
    for name, layer in layers.items():
        shard, grad_shard = (_cut(whole, layer.mesh).contiguous() for whole in (hidden, grad))
        steps[name] = partial(_step, layer, shard, grad_shard)
        verify_together(partial(_verify, name, layer, steps[name](), expected), None)
    del expected, hidden, grad
    peaks = {name: peak_bytes(step, None) for name, step in steps.items()}
    seconds = time_together(steps, repeats, None, device)
    parts = {name: time_parts(layers[name], step, repeats) for name, step in steps.items()}
    on_gpu = device.type == "cuda"
    communication = {
        name: time_communication(step) if on_gpu else {} for name, step in steps.items()
    }
    if dist.get_rank():
        return []
    baseline = next(iter(steps))
    return [
        make_row(
            own,
            dtype,
            benchmark="block step",
            case=f"{'dense' if pattern is None else 'window'}-{length}"
            f"-h{sizes['num_heads']}-kv{sizes['num_kv_heads']}"
            f"-d{sizes['hidden_size'] // sizes['num_heads']}",
            baseline=baseline,
            num_tasks=dist.get_world_size(),
            executor=name,
            ratio=seconds[baseline],
            details={
                "tokens": length,
                **sizes,
                **{f"{part}_ms": 1e3 * each for part, each in parts[name].items()},
                **({"peak_bytes": peaks[name], **communication[name]} if on_gpu else {}),
            },
        )
        for name, own in seconds.items()
    ]


def _cut(whole: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return this rank's rows."""
    if mesh is None:
        return whole
    return distribute_tensor(whole, mesh, [Shard(1), Shard(1)], src_data_rank=None).to_local()


def _step(
    layer: HybridTransformerBlock,
    shard: Tensor,
    grad_output: Tensor,
    enter: Callable[[str], None] = lambda part: None,
) -> dict[str, Tensor]:
    """Run forward and backward; return output and gradients.

    Args:
        layer: The layer; its gradients are overwritten.
        shard: This rank's input.
        grad_output: Gradient of its output.
        enter: Called with the name of a part when it begins.
    """
    layer.zero_grad()
    shard = shard.detach().requires_grad_()
    output = layer(shard)
    output.backward(grad_output)
    assert shard.grad is not None
    if layer.mesh is not None:
        enter("communication")
        reduce_gradients(layer, layer.mesh)
    enter("rest")
    gradients = {name: each.grad for name, each in layer.named_parameters()}
    return {"output": output.detach(), "input": shard.grad, **gradients}


def _expect(layer: HybridTransformerBlock, hidden: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return the results of :func:`_step` on one device, with the output verified in float64."""
    expected = _step(layer, hidden, grad)
    rows = torch.linspace(0, hidden.shape[1] - 1, _ROWS, device=hidden.device).long()
    with torch.no_grad():
        exact = _exact_rows_of(layer, hidden, rows)

    def verify() -> None:
        for i in range(_ROWS):
            verify_close("the layer on one device", expected["output"][:, rows[i]], exact[:, i])

    verify_together(verify, None)
    return expected


def _exact_rows_of(layer: HybridTransformerBlock, hidden: Tensor, rows: Tensor) -> Tensor:
    """Compute rows of the output in float64, with attention by its definition."""
    wide, hidden = copy.deepcopy(layer).double(), hidden.double()
    tokens, attention = range(hidden.shape[1]), wide.attention
    heads = attention.project(wide.attention_norm(hidden), tokens)
    problem = check_problem(*heads, is_causal=attention.is_causal, pattern=attention.pattern)
    after = hidden[:, rows] + attention.merge(exact_rows(problem, rows))
    exact: Tensor = after + wide.feed_forward(wide.feed_forward_norm(after), range(len(rows)))
    return exact


def _verify(
    name: str,
    layer: HybridTransformerBlock,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> None:
    """Compare this rank's output and gradients with those of one device."""
    for what, theirs in expected.items():
        ours = found[what]
        if what in ("output", "input"):
            theirs = _cut(theirs, layer.mesh)
        elif isinstance(ours, DTensor):
            ours = ours.full_tensor()
        what = what if what == "output" else f"gradient of {what}"
        verify_close(f"{name}: {what}", ours, theirs)
