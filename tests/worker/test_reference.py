import pytest
import torch
import torch.nn.functional as F
from support.exact import exact_answer

from benchmarks.cases import CASES
from cqs.worker.operands import Operands
from cqs.worker.reference import REFERENCE

SQUARE = [case for case in CASES if case.seqlen_q == case.seqlen_kv]


@pytest.mark.parametrize("case", SQUARE, ids=lambda case: case.name)
def test_reference_agrees_with_scaled_dot_product_attention_in_float64(case):
    problem = case.make(torch.float64)
    tensors = problem.query, problem.key, problem.value
    options = {"is_causal": problem.is_causal, "scale": problem.scale}
    expected = F.scaled_dot_product_attention(*tensors, **options, enable_gqa=True)
    output, lse = REFERENCE.attend(Operands(*tensors, **options))
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, exact_answer(problem).lse, rtol=1e-13, atol=1e-13)
