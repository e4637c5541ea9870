"""JAX: problems of ``tests/nn_test.py`` of ``dot_product_attention``, at its tolerances."""

from functools import partial
from itertools import product

from .framework import NUM_TASKS, Case, Suite, assert_close

_MASKS = (
    *(("bias",), ("causal",), ("padding",), ("custom",), ("causal", "padding")),
    *(("custom", "padding"), ("bias", "causal"), ("causal", "sliding_window")),
)


def suite():
    """Return the problems, computed by jax.nn and by cqs, with gradients."""
    import jax

    return Suite("JAX", f"jax {jax.__version__}", _cases())


def _cases():
    for dtype, group, use_vmap, compiled in product(
        ("bfloat16", "float16", "float32"), (1, 2, 4), (False, True), (False, True)
    ):
        if dtype == "float16" and compiled:
            continue  # XLA does not compile jax.nn's reference for CPUs
        options = {"group": group, "use_vmap": use_vmap, "compiled": compiled}
        yield Case(f"groups {dtype} {options}", partial(_check, dtype, (), **options))
    for dtype, modes, compiled in product(("bfloat16", "float32"), _MASKS, (False, True)):
        check = partial(_check, dtype, modes, compiled=compiled)
        yield Case(f"{dtype} {' '.join(modes)} compiled={compiled}", check)
    for window, is_causal in product(((1, 1), (32, 32), (3, 0), 5), (False, True)):
        check = partial(_check, "float32", (), local_window_size=window, is_causal=is_causal)
        yield Case(f"window {window} causal={is_causal}", check)


def _check(dtype, modes, *, group=1, use_vmap=False, compiled=False, **given):
    import jax
    import jax.numpy as jnp

    from cqs.integrations.jax import attention

    batch, length, heads, width = 2, 128, 4, 32
    keys, bias = jax.random.split(jax.random.PRNGKey(0), 5), []
    shapes = [(batch, length, number, width) for number in (heads, *[heads // group] * 2, heads)]
    query, key, value, gradient = (
        jax.random.normal(each, shape, jnp.dtype(dtype))
        for each, shape in zip(keys, shapes, strict=False)
    )
    options = dict(given)
    if "causal" in modes:
        options["is_causal"] = True
    if "padding" in modes:
        options["query_seq_lengths"] = jnp.array([length // 2, length // 4], jnp.int32)
        options["key_value_seq_lengths"] = jnp.array([length // 4, length // 2], jnp.int32)
    if "custom" in modes:
        options["mask"] = jnp.tril(jnp.ones((1, 1, length, length), bool))
    if "bias" in modes:
        shape = 1, heads, length, length
        bias = [jax.random.normal(keys[4], shape, jnp.dtype(dtype))]
    if "sliding_window" in modes:
        options["local_window_size"] = (3, 2)

    def passes(function, use_vmap):
        function = partial(function, **options)

        def both(*operands):
            attend = jax.vmap(function) if use_vmap else function
            output, pull = jax.vjp(attend, *operands)
            return output, *pull(gradient)

        return jax.jit(both) if compiled else both

    found = passes(partial(attention, num_tasks=NUM_TASKS), use_vmap)(query, key, value, *bias)
    expected = passes(jax.nn.dot_product_attention, False)(query, key, value, *bias)
    assert_close(found[:1], expected[:1], rtol=0.01, atol=0.01)
    assert_close(found[1:], expected[1:], rtol=0.02, atol=0.02)
