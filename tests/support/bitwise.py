"""Compare the exact bytes of what tests computed in two runs.

Run the tests with ``--junitxml=FILE`` before and after a change: their reports hold a hash of every
result that the fixture ``record_bits`` was given. ``python -m tests.support.bitwise BEFORE AFTER``
then lists the tests whose results differ. Plans are integers and equal everywhere; outputs are
comparable between machines with the same CPU instructions and the same PyTorch.
"""

import hashlib
import sys
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor


def digest(*results: Any) -> str:
    """Return a hash of the elements of tensors and of the text of all other results, in order."""
    digest = hashlib.sha256()
    for result in results:
        if isinstance(result, Tensor):
            flat = result.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(result).encode())
    return digest.hexdigest()[:16]


def read(path: str) -> dict[str, list[str]]:
    """Return test -> hashes of its results, in order."""
    bits = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.attrib['classname']}::{case.attrib['name']}"
        recorded = case.iterfind("properties/property[@name='bits']")
        bits[name] = [each.attrib["value"] for each in recorded]
    return bits


def main(before: str, after: str) -> int:
    """List the tests whose results differ, or that are in one report alone."""
    old, new = read(before), read(after)
    differing = sorted(name for name in old.keys() | new if old.get(name) != new.get(name))
    print(f"{len(new)} tests, {len(differing)} differ", *differing, sep="\n")
    return int(bool(differing) or not any(new.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
