"""Where an actor runs."""

import os
import socket
from typing import NamedTuple


class ActorInfo(NamedTuple):
    """Process, host and device of an actor."""

    pid: int
    """Process id on the actor's host."""
    host: str
    """Host and process namespace; processes with equal values can signal each other by pid."""
    node: str
    """Id of the actor's Ray node."""
    device: str
    """Device of the actor, ``"cuda"`` or ``"cpu"``."""


def host_name() -> str:
    """Return a name of this host and process namespace."""
    namespace = "/proc/self/ns/pid"
    inode = os.stat(namespace).st_ino if os.path.exists(namespace) else 0
    return f"{socket.gethostname()}/{inode}"
