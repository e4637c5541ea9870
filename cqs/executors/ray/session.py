"""Connects to Ray or starts a private Ray; the only module that imports it."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECONDS = 10.0
"""Seconds to wait for a TCP connection to the address of a cluster."""
_SESSION = "session_2026-01-31_12-34-56_123456"
"""Example of Ray's name of a session directory, without the process id; it gives the length."""
_PREFIX, _RAY_FOLDER = "cqs-ray-", "ray"
"""Prefix of the names of private directories, and the name of Ray's own directory in them."""
_REMOVE_LATER = 'read line; for i in 1 2 3; do sleep "$1"; rm -rf "$0"; done'
"""Shell command that waits until its input is closed, and then removes a directory."""
_REMOVAL_SECONDS = 10
"""Interval of the three removals: Ray's servers run on for a moment, and may write files."""
_CONFIG = {
    # Metrics and events are not used, and their senders leak a socket after ray.shutdown.
    "enable_metrics_collection": False,
    "enable_ray_event": False,
    "task_events_report_interval_ms": 0,
    # Seconds that close() waits for a killed GCS; Ray ends the driver after that.
    "gcs_rpc_server_reconnect_timeout_s": 10,
}
"""System configuration of a private Ray."""
_GRPC_EXPERIMENTS = "event_engine_client"
"""gRPC's new event engine: the older client leaks sockets of some refused connections."""
_IN_USE = (
    "another Cluster of this process has a private Ray, which is not shared: close that Cluster "
    "first, use it here, or start Ray yourself and pass its address to both"
)
_LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
LOCK = threading.RLock()
"""Held while this process checks its connection, connects, or ends its private Ray."""
_has_private_ray = False


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def import_ray() -> Any:
    """Return the ray module; raise NotImplementedError if Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise NotImplementedError(
            f"a Cluster requires Ray: pip install 'ray[client]' ({error})"
        ) from error
    return ray


def is_connected() -> bool:
    """Return whether this process is connected to a Ray cluster."""
    return "ray" in sys.modules and bool(import_ray().is_initialized())


def find_connection() -> Any:
    """Return an object that identifies this process's connection to Ray; None without one.

    A connection made after ``ray.shutdown()`` has another object.
    """
    if not is_connected():
        return None
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        return client.ray.get_context().client_worker
    return import_ray()._private.worker._global_node


def find_node() -> str | None:
    """Return the id of the Ray node on which this process runs; None for a Ray Client."""
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        return None
    return str(import_ray().get_runtime_context().get_node_id())


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer the Python handlers of SIGINT and SIGALRM, which may raise, to the end of the block.

    ``ray.init`` must not be interrupted: the next ``ray.init`` would end the process without an
    exception. Python runs handlers on the main thread only, so other threads defer nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    caught: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {
        signum: signal.signal(signum, lambda number, frame: caught.append((number, frame)))
        for signum in (signal.SIGINT, signal.SIGALRM)
        if is_main and callable(signal.getsignal(signum))
    }
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number, frame in caught[:1]:
            handlers[number](number, frame)


def find_address(given: str) -> str:
    """Return the address of a cluster as Ray connects to it, if a server listens there.

    Ray itself would wait for a minute or forever, without reacting to signals, or end the process.

    Args:
        given: ``"auto"``, ``"host:port"`` or ``"ray://host:port"``, as the user gave it.

    Raises:
        ValueError: The address is malformed, or no server listens there.
        NotImplementedError: Ray is not installed, or ``grpcio`` for ``ray://`` addresses.
    """
    services = import_ray()._private.services
    address = (os.environ.get("RAY_ADDRESS") if given == "auto" else None) or given
    if address.startswith("ray://") and find_spec("grpc") is None:
        raise NotImplementedError(f"address {given!r} requires grpcio: pip install 'ray[client]'")
    try:
        if not address.startswith("ray://"):
            address = services.canonicalize_bootstrap_address(address) or address
        place = urlsplit(f"ray://{address.removeprefix('ray://')}")
        socket.create_connection((place.hostname, place.port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            "address must be 'auto', HOST:PORT or ray://HOST:PORT of a running Ray cluster, got "
            f"{given!r}{f' for {address}' * (given != address)}: {error}"
        ) from error
    return address


def connect(address: str | None, resolved: str | None, stack: contextlib.ExitStack) -> Any:
    """Connect to a running cluster, or use the connection that this process has.

    Args:
        address: Address that the user gave; ``None`` uses the existing connection.
        resolved: Result of :func:`find_address` for it; ``None`` without an address.
        stack: Disconnects when it is closed, unless the connection existed before.

    Returns:
        The ray module.

    Raises:
        ValueError: No cluster answers at the address, a connection exists already, or it belongs to
            the private Ray of another Cluster.
        NotImplementedError: Ray is not installed.
    """
    ray = import_ray()
    if ray.is_initialized() and _has_private_ray:
        raise ValueError(_IN_USE)
    if ray.is_initialized():
        if address is not None:
            raise ValueError(
                f"address must be left out because Ray is connected already, got {address!r}"
            )
        return ray
    try:
        ray.init(address=resolved or address, logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"address must be that of a running Ray cluster, got {address!r}: {error}"
        ) from error
    ours = find_connection()
    stack.callback(lambda: ray.shutdown() if find_connection() is ours else None)
    return ray


def start_private_ray(
    num_cpus: int, num_gpus: int, object_store_memory: int | None, stack: contextlib.ExitStack
) -> Any:
    """Start a Ray on this machine for this process alone.

    Args:
        num_cpus: CPU cores that Ray may assign to actors.
        num_gpus: GPUs that Ray may assign to actors.
        object_store_memory: Size of the object store in bytes; ``None`` lets Ray choose.
        stack: Shuts Ray down when it is closed, which must be done with :data:`LOCK` held.

    Returns:
        The ray module.

    Raises:
        ValueError: This process has started a private Ray and not closed its Cluster.
        NotImplementedError: Ray is not installed.
    """
    if _has_private_ray:  # also after ray.shutdown(): its settings remain until close()
        raise ValueError(_IN_USE)
    ray = import_ray()
    ours: object | None = None

    def shutdown() -> None:
        if ours is None or find_connection() is ours:  # else the user has called ray.shutdown()
            ray.shutdown(wait_for_processes=True)

    stack.enter_context(_private_environment(ray))
    folder = stack.enter_context(private_folder())
    stack.callback(_end_processes_in, folder)
    stack.callback(shutdown)
    # Ray's servers listen only on the loopback interface if the address of the node is 127.0.0.1.
    # On Linux, Ray replaces that address by one of the network unless ENABLE_RAY_CLUSTER is false,
    # its default on macOS.
    constants = ray._private.ray_constants
    stack.callback(setattr, constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)
    constants.ENABLE_RAY_CLUSTER = False
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=object_store_memory,
        _node_ip_address="127.0.0.1",
        _temp_dir=os.path.join(folder, _RAY_FOLDER),
        _system_config=dict(_CONFIG),  # a copy, because Ray modifies it
    )
    ours = find_connection()
    return ray


def _end_processes_in(folder: str) -> None:
    """Kill processes of a private Ray that an interrupted start or shutdown has left."""
    import psutil  # comes with Ray

    prefix = os.path.join(folder, _RAY_FOLDER)
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(prefix in argument for argument in process.cmdline()):
                process.kill()
                process.wait()


@contextlib.contextmanager
def _private_environment(ray: Any) -> Iterator[None]:
    """Set a random token and disable usage statistics, independent of the user's settings.

    A new local Ray enables authentication unless RAY_AUTH_MODE is set. Without a token it would
    write one to the home directory, readable by all users. Ray caches mode and token in the
    process, so the cache is cleared before and after.
    """
    global _has_private_ray
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": None}
    chosen = filter(None, [os.environ.get("GRPC_EXPERIMENTS"), _GRPC_EXPERIMENTS])
    ours = {**token, "RAY_USAGE_STATS_ENABLED": "0", "GRPC_EXPERIMENTS": ",".join(chosen)}
    before = {name: os.environ.get(name) for name in ours}
    _set_environment(ours)
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    _has_private_ray = True
    try:
        yield
    finally:
        _has_private_ray = False
        if not ray.is_initialized():  # else the user has started another Ray with this token
            _set_environment(before)
            ray._raylet.Config.initialize("")  # first: remaining threads would fail without a token
            ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """Make a directory that other users cannot enter, and remove it at the end of the block.

    If this process is killed, a shell removes the directory. Ray opens its own directory to all
    users, so Ray gets a subdirectory. The parent is chosen so that the paths of Ray's sockets stay
    within the limit of the operating system.
    """
    parent = tempfile.gettempdir()
    name = f"{_PREFIX}12345678/{_RAY_FOLDER}/{_SESSION}_{os.getpid()}/sockets/plasma_store"
    if len(os.fsencode(os.path.join(parent, name))) > _LONGEST_SOCKET_PATH:
        parent = "/tmp"
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    command = ["sh", "-c", _REMOVE_LATER, folder, str(_REMOVAL_SECONDS)]
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/", start_new_session=True
    ) as remover:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            remover.kill()


def find_private_folder() -> str | None:
    """Return the directory of the private Ray to which this process is connected, or None."""
    folder, name = os.path.split(import_ray()._private.worker._global_node.get_temp_dir_path())
    is_ours = name == _RAY_FOLDER and os.path.basename(folder).startswith(_PREFIX)
    return folder if is_ours else None
