"""Starting Ray, or joining one that runs; the only module that imports it."""

import contextlib
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

_CONNECT_SECONDS = 10.0
LOCK = threading.Lock()
"""Held while this process looks whether it is connected, and connects."""


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def import_ray() -> Any:
    """Return the ray module, or raise NotImplementedError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise NotImplementedError(
            f"a Cluster needs Ray: pip install 'cqs[ray]' ({error})"
        ) from error
    return ray


def is_connected() -> bool:
    """Say whether this process is connected to a Ray cluster."""
    return "ray" in sys.modules and bool(import_ray().is_initialized())


def connect(address: str | None) -> tuple[Any, Callable[[], None]]:
    """Connect to a running cluster, or join the connection that this process has.

    Returns:
        The ray module, and what undoes the connection (nothing, if it was there before).

    Raises:
        ValueError: if no cluster answers at ``address``, or one is connected already.
    """
    ray = import_ray()
    if ray.is_initialized():
        if address is not None:
            raise ValueError(f"Ray is connected already: leave out address, got {address!r}")
        return ray, lambda: None
    found = re.fullmatch(r"(?:ray://)?(\[.+\]|[^:/]+):(\d+)", address or "")
    if not found and address != "auto":
        raise ValueError(f"address must be 'auto', HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        if found:  # Ray itself tries for minutes
            host, port = found[1].strip("[]"), int(found[2])
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (OSError, OverflowError, RuntimeError) as error:
        raise ValueError(f"no Ray cluster answers at address {address!r}: {error}") from error
    return ray, ray.shutdown


def start_private_ray(
    num_cpus: int, num_gpus: int, object_store_memory: int | None
) -> tuple[Any, Callable[[], None]]:
    """Start Ray on this machine for this process alone.

    Returns:
        The ray module, and what ends it.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A new local Ray turns authentication on by itself; given no token it would write one to the
    # home directory, readable by all.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray = import_ray()
    folder = tempfile.mkdtemp(prefix="cqs-")  # Ray opens its own folder to all, so it gets a child

    def stop() -> None:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        with _loopback_only(ray):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=False,
                logging_level="ERROR",
                log_to_driver=False,
                object_store_memory=object_store_memory,
                _node_ip_address="127.0.0.1",
                _temp_dir=os.path.join(folder, "ray"),
            )
    except BaseException:
        stop()
        raise
    return ray, stop


@contextlib.contextmanager
def _loopback_only(ray: Any) -> Iterator[None]:
    """Let a Ray that starts here listen on the loopback interface alone.

    Its servers do so if the node's address is 127.0.0.1, which Linux replaces by the address of
    the network unless Ray was told, as it is by default on macOS, to be no cluster.
    """
    constants = ray._private.ray_constants
    is_cluster = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = is_cluster
