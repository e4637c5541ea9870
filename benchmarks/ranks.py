"""The ranks that torchrun started, or one device alone."""

import os
from typing import Any

import torch
import torch.distributed as dist


def join_ranks() -> torch.device:
    """Join the process group of torchrun, or make one of this process; return this rank's device.

    Ranks have one GPU each, or share CPUs.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    given = {} if "RANK" in os.environ else alone
    dist.init_process_group(backend, device_id=device_id, **given)
    return device
