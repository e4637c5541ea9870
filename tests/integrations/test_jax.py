"""Attention for JAX is that of jax.nn, on the same arrays, with its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program import run_program

from cqs.integrations.jax import attention
from cqs.patterns import sliding_window

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def operands(seqlen_q=23, seqlen_kv=23, batch=2, dtype=jnp.float64):
    """Query, key, value and a gradient of the output."""
    random = np.random.default_rng(0)
    shapes = [(batch, seqlen_q, 4, 8), *[(batch, seqlen_kv, 2, 8)] * 2, (batch, seqlen_q, 4, 8)]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def compare(function, tensors, tolerance=1e-6, compiled=False):
    """Compare a function of attention; jax.nn's softmax is in float32, whatever it is given."""
    wanted = jax.jit(partial(function, jax.nn.dot_product_attention))(*tensors)
    found = partial(function, partial(attention, num_tasks=3))
    found = (jax.jit(found) if compiled else found)(*tensors)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        difference = np.asarray(got, float) - np.asarray(want, float)
        assert np.abs(difference).max() < tolerance
    return found


def check(tensors, tolerance=1e-6, compiled=False, **options):
    """Compare outputs and gradients."""

    def passes(attend, query, key, value, grad_output):
        output, pull = jax.vjp(partial(attend, **options), query, key, value)
        return output, *pull(grad_output)

    found = compare(passes, tensors, tolerance, compiled)
    assert {each.dtype for each in found} == {tensors[0].dtype}


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((23, 23), {"local_window_size": 4, "scale": 0.3}),
        ((9, 30), {"local_window_size": (3, 1), "is_causal": True}),
        ((30, 9), {"is_causal": True}),
        ((30, 25), {"local_window_size": (6, 2)}),
    ],
    ids=str,
)
def test_output_and_gradients_match_jax(options, lengths):
    check(operands(*lengths), **options)


def test_masks_and_lengths_match_jax():
    mask = np.random.default_rng(1).random((2, 4, 23, 23)) < 0.4
    mask |= np.eye(23, dtype=bool)
    lengths = {
        "query_seq_lengths": jnp.array([23, 11], jnp.int32),
        "key_value_seq_lengths": jnp.array([23, 13], jnp.int32),
    }
    check(operands(), mask=mask[:1, :1] | (np.arange(23) < 1), is_causal=True, **lengths)
    check(operands(), mask=mask, compiled=True)
    check(operands(), mask=mask[0, 0], scale=jnp.float64(0.3))


def test_lengths_may_be_known_late():
    query, key, value, _ = operands()
    lengths = jnp.array([5, 23], jnp.int32)

    @jax.jit
    def compute(lengths):
        return attention(query, key, value, key_value_seq_lengths=lengths)

    expected = attention(query, key, value, key_value_seq_lengths=lengths)
    assert (compute(lengths) == expected).all()
    assert (expected[0] == attention(query[0], key[0, :5], value[0, :5])).all()


def test_narrow_dtypes_and_a_single_sequence_match_jax():
    check([each[0] for each in operands(dtype=jnp.float32)], 1e-5)
    check(operands(dtype=jnp.bfloat16), 0.05, compiled=True, is_causal=True)


@pytest.mark.parametrize(("shape", "compiled"), [((2, 4, 9, 30), False), ((2, 1, 1, 30), True)])
def test_biases_and_residuals_match_jax(shape, compiled):
    random = np.random.default_rng(2)
    bias, (query, key, value, grad_output) = random.standard_normal(shape), operands(9, 30)
    mask = random.random((9, 30)) < 0.8

    def both(attend, query, key, value, bias):
        attend = partial(attend, mask=mask, return_residual=True)
        (output, lse), pull = jax.vjp(attend, query, key, value, bias)
        return output, lse, *pull((grad_output, jnp.zeros_like(lse)))

    compare(both, (query, key, value, jnp.asarray(bias)), 1e-5, compiled)
    assert attention(query[0], key[0], value[0], return_residual=True)[1].shape == (9, 4)


def test_vmap_and_a_pattern():
    query, key, value, _ = operands(batch=3)
    pattern = sliding_window(4, 4)
    found = jax.vmap(partial(attention, pattern=pattern))(query, key, value)
    assert (found == attention(query, key, value, pattern=pattern)).all()
    assert (found == attention(query, key, value, local_window_size=4)).all()


def test_a_query_that_sees_no_key_gives_nothing():
    query, key, value, grad_output = operands(30, 9)
    output, pull = jax.vjp(partial(attention, local_window_size=(2, 0)), query, key, value)
    assert (output[:, 11:] == 0).all() and (output[:, :11] != 0).all()
    grad_query, *others = pull(grad_output)
    assert (grad_query[:, 11:] == 0).all()
    assert all(jnp.isfinite(gradient).all() for gradient in others)


@pytest.mark.gpu
def test_arrays_stay_on_the_gpu():
    """In a process of its own, with a JAX that has not taken most of the memory."""
    pytest.importorskip("jax_plugins", reason="needs JAX for CUDA")
    run_program("jax_on_gpu.py")


def test_what_is_not_supported_is_refused():
    query, key, value, _ = operands()
    with pytest.raises(ValueError, match="head_dim"):  # before anything is compiled
        jax.jit(attention)(query[..., :4], key, value)
    with pytest.raises(ValueError, match=r"bias must be broadcastable .* got \[1, 1, 9, 23\]"):
        attention(query, key, value, jnp.zeros((9, 23)))
    with pytest.raises(TypeError, match="bias must be float64, .* got torch.int32"):
        attention(query, key, value, jnp.zeros((23, 23), jnp.int32))
    with pytest.raises(ValueError, match=r"mask must be .*, got 0\.5"):
        attention(query, key, value, mask=jnp.full((1, 1, 23, 23), 0.5))
    with pytest.raises(TypeError, match="query must be float64"):
        attention(*(each.astype(int) for each in (query, key, value)))
    with pytest.raises(TypeError, match="reverse-mode|jvp"):
        jax.jvp(lambda query: attention(query, key, value), (query,), (query,))
