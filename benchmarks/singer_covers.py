"""Construct the perfect difference sets that ``interest_sets/`` stores for W = q^2 + q + 1.

In a perfect set of q + 1 elements, every nonzero integer modulo W is a difference exactly once. The
sets up to W = 91 are published ones; :func:`singer_cover` made the larger.
"""

import math
from collections.abc import Iterable


def prime_power(number: int) -> tuple[int, int] | None:
    """Return ``(p, k)`` with ``number == p**k`` and p prime, or None.

    Example:
        >>> prime_power(27), prime_power(12)
        ((3, 3), None)
    """
    factors = _prime_factors(number)
    if len(factors) != 1:
        return None
    (prime,) = factors
    return prime, round(math.log(number, prime))


def singer_order(modulus: int) -> int | None:
    """Return the prime power q with ``q*q + q + 1 == modulus``, or None.

    Example:
        >>> singer_order(7), singer_order(8)
        (2, None)
    """
    q = (math.isqrt(4 * modulus - 3) - 1) // 2
    return q if q * q + q + 1 == modulus and prime_power(q) else None


def singer_cover(modulus: int) -> tuple[int, ...]:
    """Construct the perfect difference set of q + 1 elements for ``modulus == q*q + q + 1``.

    Let x be a primitive element of the field of q^3 elements. The set consists of the exponents i
    below ``modulus`` for which x^i has trace 0 over the field of q elements. These powers form a
    plane through 0 (Singer, Transactions of the AMS 43, 1938).

    Raises:
        ValueError: ``modulus`` is not ``q*q + q + 1`` for any prime power q.

    Example:
        >>> singer_cover(13)
        (0, 1, 3, 9)
    """
    q = singer_order(modulus)
    if q is None:
        raise ValueError(f"modulus must be q*q + q + 1 with q a prime power, got {modulus}")
    prime, exponent = prime_power(q) or (q, 1)
    field = _Field.with_primitive_x(prime, 3 * exponent)
    # The trace y + y^q + y^(q^2) is linear, so the traces of 1, x, x^2 ... obey the recurrence of
    # the powers of x. Only those of the first powers are computed from their conjugates.
    conjugates = [field.power(field.x, q**conjugate) for conjugate in range(3)]
    powers = [field.one] * 3
    traces = []
    for _ in range(field.degree):
        traces.append([sum(digits) % prime for digits in zip(*powers, strict=True)])
        powers = [field.multiply(a, b) for a, b in zip(powers, conjugates, strict=True)]
    digits = [list(column) for column in zip(*traces, strict=True) if any(column)]
    terms = [(j, factor) for j, factor in enumerate(field.reduction) if factor]
    for column in digits:
        for i in range(modulus - field.degree):
            column.append(sum(factor * column[i + j] for j, factor in terms) % prime)
    plane = [i for i, trace in enumerate(zip(*digits, strict=True)) if not any(trace)]
    return min(translates_with_0_and_1(plane, modulus))


def translates_with_0_and_1(cover: Iterable[int], modulus: int) -> list[tuple[int, ...]]:
    """Return the translates of ``cover`` that contain 0 and 1, each sorted."""
    elements = set(cover)
    return [
        tuple(sorted((element - shift) % modulus for element in elements))
        for shift in elements
        if (shift + 1) % modulus in elements
    ]


def _prime_factors(number: int) -> set[int]:
    factors, divisor = set(), 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.add(divisor)
            number //= divisor
        divisor += 1
    return factors | ({number} if number > 1 else set())


class _Field:
    """Polynomials of degree below n over the integers modulo a prime, modulo a monic polynomial."""

    def __init__(self, prime: int, low_coefficients: tuple[int, ...]):
        self.prime = prime
        self.degree = len(low_coefficients)
        self.reduction = tuple(-c % prime for c in low_coefficients)  # x^n in lower powers
        self.one = (1,) + (0,) * (self.degree - 1)
        self.x = (0, 1) + (0,) * (self.degree - 2)

    @classmethod
    def with_primitive_x(cls, prime: int, degree: int) -> "_Field":
        """Return the field of the first polynomial modulo which x is a primitive element."""
        order = prime**degree - 1
        maximal = [order // factor for factor in _prime_factors(order)]
        for code in range(1, prime**degree):
            field = cls(prime, tuple(code // prime**i % prime for i in range(degree)))
            if field.power(field.x, order) == field.one and all(
                field.power(field.x, exponent) != field.one for exponent in maximal
            ):
                return field
        raise AssertionError("a primitive polynomial exists for every prime and degree")

    def multiply(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        product = [0] * (2 * self.degree - 1)
        for i, coefficient in enumerate(a):
            if coefficient:
                for j, other in enumerate(b):
                    product[i + j] += coefficient * other
        for power in range(2 * self.degree - 2, self.degree - 1, -1):
            if carry := product[power] % self.prime:
                for j, coefficient in enumerate(self.reduction):
                    product[power - self.degree + j] += carry * coefficient
        return tuple(coefficient % self.prime for coefficient in product[: self.degree])

    def power(self, base: tuple[int, ...], exponent: int) -> tuple[int, ...]:
        result = self.one
        while exponent:
            if exponent & 1:
                result = self.multiply(result, base)
            base = self.multiply(base, base)
            exponent >>= 1
        return result
