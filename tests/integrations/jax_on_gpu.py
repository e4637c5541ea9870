"""Attention for JAX on a GPU that PyTorch shares; a program, for JAX reads its settings once."""

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

from functools import partial

import jax
import jax.numpy as jnp

from cqs.integrations.jax import attention

PLATFORM = "gpu"
TOKENS = 1000


def passes(attend, query, key, value, grad_output):
    """Return the output of an attention function and its gradients."""
    output, pull = jax.vjp(attend, query, key, value)
    return output, *pull(grad_output.astype(output.dtype))


def draw(dtype):
    """Query, key, value and a gradient of the output."""
    shape = (4, 2, TOKENS, 4, 64)
    return list(jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype))


def check_close():
    """Outputs and gradients are those of JAX, and stay where the operands are."""
    operands = draw(jnp.float32)
    ours = passes(partial(attention, is_causal=True, num_tasks=3), *operands)
    expected = passes(partial(jax.nn.dot_product_attention, is_causal=True), *operands)
    for got, want in zip(ours, expected, strict=True):
        assert got.devices() == operands[0].devices() and got.dtype == want.dtype
        assert jnp.abs(got - want).max() < 1e-4 * jnp.abs(want).max()


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
    jax.config.update("jax_default_matmul_precision", "highest")
    assert jax.default_backend() == PLATFORM
    check_close()
    check_order()
