"""Merge the partial outputs of tasks, and sum their gradients. Uses torch, without Ray."""

from cqs.tiler.tiler import Tiler
