"""Layouts of tensors in memory."""

LAYOUTS = {
    "seqlen-before-heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "heads-before-batch": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "every-other-token": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "every-other-element": lambda t: t.repeat_interleave(2, dim=3)[..., ::2],
    "columns-adjacent": lambda t: t.mT.contiguous().mT,
}
"""Name -> function that stores a tensor in another layout."""
