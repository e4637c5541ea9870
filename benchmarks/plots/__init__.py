"""Plots of benchmark results; every function returns matplotlib axes."""
