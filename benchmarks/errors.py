"""Relative errors of results compared with those of another computation."""

from torch import Tensor

from cqs.partial import lse_dtype
from cqs.report.exact import TOLERANCES, check_error


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference divided by that of ``expected``."""
    if not expected.numel():
        return 0.0
    found, expected = (tensor.to(lse_dtype(tensor.dtype)) for tensor in (found, expected))
    return float((found - expected).norm() / expected.norm())


def verify_close(name: str, found: Tensor, expected: Tensor) -> None:
    """Raise VerificationError unless a tensor is that of another computation, within its dtype."""
    check_error(name, relative_error(found, expected), TOLERANCES[found.dtype])
