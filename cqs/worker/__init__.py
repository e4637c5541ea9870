"""Computation of tasks on one device, with torch and without Ray."""

from cqs.worker.backend import CallBackend, TaskBackend
from cqs.worker.backends import BACKENDS, choose_backend
from cqs.worker.held_tokens import HeldTokens, join_rows
from cqs.worker.worker import Worker
