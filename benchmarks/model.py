"""Training steps of a transformers model, on one device and on ranks that share its tokens."""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.bottleneck import load_config
from benchmarks.errors import relative_error
from benchmarks.options import add_common
from benchmarks.peers import peak_bytes, time_together, verify_together
from benchmarks.publish import make_row, publish
from benchmarks.ranks import join_ranks
from cqs.arguments import as_integer
from cqs.integrations.transformers import register
from cqs.report.exact import TOLERANCES, check_error
from cqs.report.measurement import Measurement, append_rows

_LAYERS = {"llama-8b": 4, "llama-1b": 8, "llama-tiny": 2}
"""Name of a shape -> number of its layers here."""
_ALONE = "sdpa", "cqs one"
METHODS = (*_ALONE, "cqs")
"""Names of methods: two of the first rank alone, and one of all ranks."""
_SLACK = 5
"""Factor on the tolerance of attention, for gradients after all layers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    add_common(parser, several_lengths=True)
    shapes = list(_LAYERS)
    parser.add_argument("--model", choices=shapes, help="default: llama-8b; on CPUs llama-tiny")
    parser.add_argument("--peer", action="store_true", help="also PyTorch's context parallelism")


def run(
    *,
    tokens: Sequence[int] | None = None,
    model: str | None = None,
    peer: bool = False,
    repeats: int = 5,
    out: str | None = None,
) -> None:
    """Verify and time training steps with random weights, on the ranks that torchrun started.

    A step is a forward pass, its loss, a backward pass, the sum of gradients over ranks, their norm
    and AdamW with a learning rate of 0, so that all steps compute the same. ``sdpa`` and ``cqs
    one`` run on the first rank alone, ``cqs`` and ``torch`` on all, each with its part of the
    tokens. A time is that of the slowest rank. Weights are bfloat16 on GPUs and float32 on CPUs;
    the vocabulary has 32,000 words (``llama-tiny``: 100).

    Args:
        tokens: Sequence lengths, at least 2 for each rank; ``None`` means 16K and 32K, or 512 on
            CPUs.
        model: Name of a shape; ``None`` means ``"llama-8b"``, or ``"llama-tiny"`` on CPUs.
        peer: Whether to run ``torch``, PyTorch's context parallelism, a prototype for GPUs.
        repeats: Number of repeats.
        out: File to append rows to, or ``None``.

    Raises:
        ValueError: ``peer`` is True on CPUs, or there are too few tokens.
        VerificationError: The loss, or a gradient of the first layer's queries, keys and values, is
            not that of ``sdpa``; on every rank.
    """
    for length in tokens or []:
        as_integer("tokens", length, 2 * int(os.environ.get("WORLD_SIZE", 1)))
    if peer and not torch.cuda.is_available():
        raise ValueError("peer must be False on CPUs, got True")
    device = join_ranks()
    on_gpu = device.type == "cuda"
    names = [*METHODS[: 2 if dist.get_world_size() == 1 else 3], *(["torch"] if peer else [])]
    rows: list[Measurement] = []
    for length in tokens or ([2**14, 2**15] if on_gpu else [512]):
        shape = model or ("llama-8b" if on_gpu else "llama-tiny")
        found = measure(dist.group.WORLD, shape, length, names, device, repeats)
        append_rows(found, out)
        rows += found
    columns: dict[str, Callable[[Measurement], object]] = {
        "case": lambda row: row.case,
        "method": lambda row: row.executor,
        "ranks": lambda row: row.num_tasks,
        "ms": lambda row: f"{row.median_ms:.1f}",
        "tokens/s": lambda row: f"{row.details['tokens_per_second']:,.0f}",
        "times sdpa": lambda row: f"{1 / row.ratio:.2f}",
        "GiB": lambda row: f"{row.details['peak_bytes'] / 2**30:.1f}",
    }
    if rows:
        publish(rows, columns, None)
    dist.destroy_process_group()


def measure(
    group: Any, shape: str, length: int, names: Sequence[str], device: torch.device, repeats: int
) -> list[Measurement]:
    """Verify and time the steps of one model; every rank of the group calls this.

    Args:
        group: The process group.
        shape: Name of a shape.
        length: Number of tokens.
        names: Names of methods, ``"sdpa"`` first.
        device: Device of this rank.
        repeats: Number of repeats.

    Returns:
        The rows on the first rank, an empty list on the others.

    Raises:
        VerificationError: See :func:`run`.
    """
    register("cqs-one")
    register("cqs-on-ranks", group=group)
    training = Training(group, shape, length, device)
    steps: dict[str, Callable[[], Any]] = {name: partial(training.step, name) for name in names}
    expected = steps["sdpa"]()
    losses = {}
    for name, step in steps.items():
        outcome = step()
        losses[name] = float(outcome[0])
        for what, own, whole in zip(
            ("loss", "query", "key", "value"), outcome, expected, strict=True
        ):
            both = torch.stack([own, whole])
            dist.broadcast(both, group=group, group_src=0)
            error, most = relative_error(*both), _SLACK * TOLERANCES[training.dtype]
            verify_together(partial(check_error, f"{name}: {what}", error, most), group)
    peaks = {name: peak_bytes(step, group) for name, step in steps.items()}
    seconds = time_together(steps, repeats, group, device)
    rows = [
        make_row(
            own,
            training.dtype,
            benchmark="model step",
            case=f"{shape}-{length}",
            baseline="sdpa",
            num_tasks=1 if name in _ALONE else dist.get_world_size(group),
            executor=name,
            ratio=seconds["sdpa"],
            details={
                "tokens": length,
                "tokens_per_second": length / statistics.median(own),
                "loss": losses[name],
                "peak_bytes": peaks[name],
            },
        )
        for name, own in seconds.items()
    ]
    return rows if dist.get_rank(group) == 0 else []


class Training:
    """A model, its optimizer, and one sequence."""

    def __init__(self, group: Any, shape: str, length: int, device: torch.device) -> None:
        """Make a model with the same random weights and tokens on every rank."""
        from transformers import AutoModelForCausalLM

        config = load_config(shape)
        config.num_hidden_layers, config.max_position_embeddings = _LAYERS[shape], length
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._group, self._rank = group, dist.get_rank(group)
        torch.manual_seed(0)
        with device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
            tokens = torch.randint(0, config.vocab_size, (1, length + 1))
            positions = torch.arange(length)[None]
        keys = "input_ids", "labels", "position_ids"
        self._inputs = dict(zip(keys, (tokens[:, :-1], tokens[:, 1:], positions), strict=True))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, weight_decay=0.0)

    def step(self, name: str) -> list[Tensor]:
        """Run one step by a method; every rank calls this.

        Returns:
            The loss, and the gradients of the weights of the first layer's queries, keys and
            values; zeros on ranks that compute nothing.
        """
        layer = self._model.model.layers[0].self_attn
        weights = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
        if self._rank and name in _ALONE:
            return [weights[0].new_zeros(()).float(), *map(torch.zeros_like, weights)]
        implementations = {"cqs one": "cqs-one", "cqs": "cqs-on-ranks"}
        self._model.set_attn_implementation(implementations.get(name, "sdpa"))
        self._optimizer.zero_grad()
        with self._shards(name) as inputs:
            inputs |= {"shift_labels": inputs["labels"], "use_cache": False}
            number = self._inputs["labels"].numel()
            loss: Tensor = self._model(**inputs, num_items_in_batch=number).loss
            loss.backward()
        gradients = [parameter.grad for parameter in self._model.parameters()]
        for tensor in [] if name in _ALONE else [loss.detach(), *gradients]:
            dist.all_reduce(tensor, group=self._group)
        nn.utils.get_total_norm(gradients)
        self._optimizer.step()
        return [loss.detach().float(), *(weight.grad.clone() for weight in weights)]

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._group, "cuda")

    @contextmanager
    def _shards(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield what this rank computes with, in the context in which it does."""
        number = dist.get_world_size(self._group)
        if name != "torch":
            parts = 1 if name in _ALONE else number
            yield {n: t.tensor_split(parts, 1)[self._rank % parts] for n, t in self._inputs.items()}
            return
        from torch.distributed.tensor.experimental import context_parallel

        inputs = {key: each.clone() for key, each in self._inputs.items()}
        # Without a mask, positions that do not increase by 1 would mean packed sequences.
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        buffers = list(inputs.values())
        divided = context_parallel(
            self._mesh,
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers={*buffers},
        )
        with divided, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield inputs
