"""Tensors as flat buffers that Ray's object store maps instead of copying."""

import warnings

import torch
from torch import Tensor


class Blob:
    """A CPU tensor of any dtype that pickles as one out-of-band uint8 buffer.

    Torch tensors pickle in band, which makes several copies. Ray puts a numpy array into shared
    memory once, and every process of the host reads it there.
    """

    __slots__ = ("_bytes", "_dtype", "_order", "_shape")

    def __init__(self, tensor: Tensor):
        """Wrap a tensor; copy it if it is on a GPU, has gaps, or is negated or conjugated."""
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        self._order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        """Dimensions from the largest stride to the smallest."""
        stored = tensor.permute(self._order).contiguous()
        self._bytes = _flat(stored).view(torch.uint8).numpy()
        self._dtype = tensor.dtype
        self._shape = tuple(stored.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self._bytes.nbytes

    def tensor(self) -> Tensor:
        """Return a CPU tensor that views the buffer, with dimensions ordered as in the original.

        It must not be written to: other processes may share its memory.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            stored = _flat(torch.from_numpy(self._bytes)).view(self._dtype).reshape(self._shape)
        places = [self._order.index(dim) for dim in range(stored.ndim)]
        return stored.permute(places)


def _flat(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a vector of stride 1, also one of no or one element."""
    return tensor.as_strided((tensor.numel(),), (1,))
