"""Benchmarks: each configuration is checked, then timed against its baseline in the same run."""
