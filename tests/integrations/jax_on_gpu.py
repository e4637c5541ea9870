"""Attention for JAX on a GPU that PyTorch shares; a program, for JAX reads its settings once."""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

from functools import partial

import jax
import jax.numpy as jnp
import torch
from support.exact import assert_tracks_exact

from cqs.integrations.jax import attention

PLATFORM = "gpu"
TOKENS = 1000


def passes(attend, query, key, value, grad_output):
    """Return the output of an attention function and its gradients."""
    output, pull = jax.vjp(attend, query, key, value)
    return output, *pull(grad_output.astype(output.dtype))


def exact_attention(query, key, value):
    """Causal, in the dtype of the operands, which have as many KV heads as query heads."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def draw(dtype):
    """Query, key, value and a gradient of the output."""
    shape = (4, 2, TOKENS, 4, 64)
    return list(jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype))


def check_exact(dtype):
    """Outputs and gradients track float64, and stay where the operands are."""
    operands = draw(dtype)
    found = passes(partial(attention, is_causal=True, num_tasks=3), *operands)
    eager = passes(partial(jax.nn.dot_product_attention, is_causal=True), *operands)
    exact = passes(exact_attention, *(each.astype(jnp.float64) for each in operands))
    for name, *arrays in zip(("output", "query", "key", "value"), found, eager, exact, strict=True):
        assert arrays[0].devices() == operands[0].devices() and arrays[0].dtype == dtype
        assert_tracks_exact(*map(torch.from_dlpack, arrays), slack=3, name=name)


def check_order(rounds=20):
    """What JAX still computes is waited for, and what PyTorch still reads is not written to."""
    query, key, value, other = draw(jnp.bfloat16)

    @jax.jit
    def prepare(query):
        mixed = query.reshape(-1, TOKENS)
        for _ in range(20):
            mixed = jnp.tanh(mixed @ (mixed.T @ mixed) / TOKENS)
        return mixed.reshape(query.shape)

    def step(query):
        output = attention(prepare(query), prepare(key), prepare(value), is_causal=True)
        return prepare(output)

    first = step(query)
    for _ in range(rounds):
        step(other)
        assert (step(query) == first).all()


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    assert jax.default_backend() == PLATFORM
    for dtype in (jnp.float32, jnp.bfloat16):
        check_exact(dtype)
    check_order()
