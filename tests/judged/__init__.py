"""Published tests and cases of other projects, computed by cqs."""

SUITES = (
    "onnx_attention",
    "torch_opinfo",
    "flex_masks",
    "jax_attention",
    "transformers_models",
    "ring_problems",
    "flash_attention",
    "deepspeed_layouts",
    "natten_neighbourhoods",
)
"""Modules of this package with a function ``suite``."""
