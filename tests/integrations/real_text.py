"""Real sentences and documents: what Python's standard library says of itself."""

import argparse
import ast
import collections
import inspect
import json
import logging
import re
from pathlib import Path

MODULES = (argparse, collections, inspect, json, logging, re)


def sentences(number):
    """The first sentences of docstrings, in their order, of 20 to 300 characters."""
    found = {}
    for module in MODULES:
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                parts = re.split(r"(?<=[.!?])\s+", text)
                found |= dict.fromkeys(part for part in parts if 20 <= len(part) <= 300)
    assert len(found) >= number
    return list(found)[:number]


def documents(number):
    """Source files, longer than the model reads."""
    return [Path(module.__file__).read_text() for module in MODULES[:number]]
