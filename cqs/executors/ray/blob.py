"""Tensors as flat buffers that Ray's object store maps instead of copying."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor


class DenseLayout(NamedTuple):
    """Dtype, sizes and order of strides of a tensor that is stored without gaps."""

    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Its sizes, from the dimension with the largest stride to that with the smallest."""
    order: tuple[int, ...]
    """The dimensions in this order."""

    @classmethod
    def like(cls, tensor: Tensor) -> "DenseLayout":
        """Return the layout of a tensor without its gaps; elements of a row are adjacent."""
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        if order[-1:] != [tensor.ndim - 1]:  # kernels round otherwise on other strides
            order = list(range(tensor.ndim))
        return cls(tensor.dtype, tuple(tensor.shape[dim] for dim in order), tuple(order))

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor, given at least its bytes, uint8."""
        num_bytes = torch.Size(self.shape).numel() * self.dtype.itemsize
        stored = _flat(memory[:num_bytes]).view(self.dtype).reshape(self.shape)
        return stored.permute([self.order.index(dim) for dim in range(len(self.order))])


class Blob:
    """A CPU tensor of any dtype that pickles as one out-of-band uint8 buffer.

    Torch tensors pickle in band, which makes several copies. Ray puts a numpy array into shared
    memory once, and every process of the host reads it there.
    """

    def __init__(self, tensor: Tensor):
        """Wrap a tensor; copy it if it is on a GPU, has gaps, or is negated or conjugated."""
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
        self._layout = DenseLayout.like(tensor)
        stored = tensor.permute(self._layout.order).contiguous()
        self._bytes = _flat(stored).view(torch.uint8).numpy()

    def tensor(self) -> Tensor:
        """Return a CPU tensor that views the buffer, with dimensions ordered as in the original.

        It must not be written to: other processes may share its memory.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return self._layout.view(torch.from_numpy(self._bytes))


def _flat(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a vector of stride 1, also one of no or one element."""
    return tensor.as_strided((tensor.numel(),), (1,))
