"""What a backend that takes whole tasks is given."""

from typing import NamedTuple


class Rectangle(NamedTuple):
    """Some query rows and the keys that they attend to, in rows of the tensors."""

    queries: range
    keys: tuple[range, ...]
    """What every query sees."""
    causal_keys: range | None = None
    """As many keys as queries; query i sees the first i + 1 of them."""
