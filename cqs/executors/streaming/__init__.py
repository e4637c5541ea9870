"""Attention within a memory budget: inputs are read, and results written, in parts."""
