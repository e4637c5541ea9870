"""PyTorch: OpInfo samples of attention operators, and ModuleInfo samples of modules."""

import copy
from functools import partial
from itertools import product
from unittest import SkipTest, mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._comparison import default_tolerances
from torch.utils._pytree import tree_map

from .framework import Case, Suite, assert_as_exact_as, assert_close, assert_tracks
from .sdpa import scaled_dot_product_attention

DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (5e-6, 5e-5),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float16: (1e-1, 1e-1),
}
"""Dtype -> relative and absolute tolerance: of OpInfo, and in half precision of PyTorch's
``test_scaled_dot_product_fused_attention_mask_vs_math_cpu``, which OpInfo does not cover."""
_MODULES = """
    MultiheadAttention TransformerEncoderLayer TransformerEncoder TransformerDecoderLayer
    Transformer
""".split()


def suite():
    """Return the samples of the installed PyTorch, in four dtypes, with gradients."""
    return Suite("PyTorch OpInfo", f"torch {torch.__version__}", _cases())


def _cases():
    from torch.testing._internal.common_methods_invocations import op_db

    operators = {op.name: op for op in op_db}
    for name, as_call in CALLS.items():
        for dtype in DTYPES:
            samples = operators[name].sample_inputs("cpu", dtype, requires_grad=True)
            for number, sample in enumerate(samples):
                check = partial(_check_operator, as_call, sample)
                yield Case(f"{name} {dtype} {number}", check)
    yield from _module_cases()


def _check_operator(as_call, sample):
    operands, options = as_call(sample)
    leading = torch.broadcast_shapes(*(each.shape[:-2] for each in operands), (1, 1))
    # With four dimensions PyTorch, too, calls a fused kernel.
    operands = [each.expand(*leading, *each.shape[-2:]) for each in operands]
    if options["dropout_p"]:
        _check_dropout([each.detach() for each in operands], options)
        return
    mask, functions = options.pop("attn_mask", None), []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        functions.append(partial(_with_mask, partial(function, **options), mask))
    tolerance = TOLERANCES[operands[0].dtype]
    assert_as_exact_as(functions[0], functions[1], operands, tolerance)
    if mask is not None and mask.requires_grad:  # apart: PyTorch's fused kernels do not derive it
        functions = [partial(_of_mask, function.args[0], operands) for function in functions]
        assert_as_exact_as(functions[0], functions[1], [mask], tolerance)


def _with_mask(function, mask, *operands):
    """Call a function with a mask, in the dtype of the operands if it is a bias."""
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().to(operands[0].dtype)
    return function(*operands, attn_mask=mask)


def _of_mask(function, operands, mask):
    """Call a function with operands in the dtype of a bias."""
    return function(*(each.detach().to(mask.dtype) for each in operands), attn_mask=mask)


def _check_dropout(operands, options):
    """Check that each weight is zeroed or divided by 1 - p, and that values are weighted so.

    Random numbers of PyTorch and of cqs differ, so that outputs are not comparable.
    """
    query, key, value = operands
    rtol, atol = TOLERANCES[query.dtype]
    unit = torch.eye(key.shape[-2], dtype=query.dtype)
    dropped = scaled_dot_product_attention(query, key, unit, **options, seed=7)
    options = options | {"dropout_p": 0.0}
    kept = F.scaled_dot_product_attention(query, key, unit, **options) / 0.5
    is_kept = dropped != 0
    assert 0.2 < is_kept[kept != 0].float().mean() < 0.8
    assert_close([dropped], [torch.where(is_kept, kept, 0)], rtol=rtol, atol=atol)
    options["dropout_p"] = 0.5
    output = scaled_dot_product_attention(query, key, value, **options, seed=7)
    assert_close([output], [dropped @ value], rtol=rtol, atol=atol)


def _of_sdpa(sample):
    return [sample.input, *sample.args], dict(sample.kwargs)


def _of_aten(sample):
    """Return the problem of a sample of aten's fused kernels, whose heads are after the tokens."""
    operands = [each.transpose(1, 2) for each in (sample.input, *sample.args)]
    given = sample.kwargs
    options = {name: given[name] for name in ("dropout_p", "scale")}
    mask_type = given.get("custom_mask_type", int(given.get("is_causal", False)))
    lengths = operands[0].shape[2], operands[1].shape[2]
    mask = torch.ones(lengths, dtype=torch.bool)
    if given.get("bias") is not None:
        options["attn_mask"] = given["bias"]
    elif (ends := given.get("cu_seqlens_q")) is not None:
        document = torch.bucketize(torch.arange(lengths[0]), ends, right=True)
        options["attn_mask"] = document[:, None] == document
    elif mask_type == 1:
        options["is_causal"] = True
    elif mask_type == 2:  # aligned at the bottom right
        options["attn_mask"] = mask.tril(lengths[1] - lengths[0])
    return operands, options


CALLS = {
    "nn.functional.scaled_dot_product_attention": _of_sdpa,
    "torch.ops.aten._flash_attention_forward": _of_aten,
    "torch.ops.aten._efficient_attention_forward": _of_aten,
}
"""Name of an operator -> function that returns the operands and options of a sample."""


def _module_cases():
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if info.name.removeprefix("nn.") not in _MODULES:
            continue
        for dtype, training in product(DTYPES[:2], (False, True)):
            samples = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
            for number, sample in enumerate(samples):
                name = f"{info.name} {dtype} {'train' if training else 'eval'} {number}"
                yield Case(name, partial(_check_module, info, sample, dtype, training))


def _check_module(info, sample, dtype, training):
    """Compare outputs and gradients of a module, with and without attention by cqs."""
    arguments = sample.constructor_input
    module = info.module_cls(*arguments.args, **arguments.kwargs).to(dtype).train(training)
    exact = _pass(copy.deepcopy(module).double(), sample, torch.float64)
    eager = _pass(module, sample, dtype)
    function = mock.Mock(side_effect=scaled_dot_product_attention)
    with mock.patch.object(F, "scaled_dot_product_attention", function):
        found = _pass(module, sample, dtype)
    if not function.called:
        raise SkipTest("the module computes its scores without this function")
    assert_tracks(found, eager, exact, default_tolerances(dtype))


def _pass(module, sample, dtype):
    """Return outputs and the gradients of all parameters."""

    def convert(value):
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().to(dtype) if is_real else value

    torch.manual_seed(1)
    module.zero_grad()
    given = sample.forward_input
    outputs = module(*map(convert, given.args), **tree_map(convert, given.kwargs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = [each for each in outputs if each is not None]
    sum(each.square().sum() for each in found).backward()
    parameters = (each.grad for each in module.parameters() if each.grad is not None)
    return [*(each.detach() for each in found), *(each.clone() for each in parameters)]
