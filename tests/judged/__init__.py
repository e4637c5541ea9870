"""Published tests and cases of other projects, computed by cqs."""

SUITES = ("onnx_attention", "torch_opinfo")
"""Modules of this package with a function ``suite``."""
