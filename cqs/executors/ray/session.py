"""Starting Ray, or joining one that runs; the only module that imports it."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

_CONNECT_SECONDS = 10.0
_SESSION = "session_2026-01-31_12-34-56_123456"
"""How Ray names the directory of a session, but for the process id."""
_PREFIX, _RAY_FOLDER, _LOCK_FILE = "cqs-ray-", "ray", "cqs-ray.lock"
_CONFIG = {
    # Nobody reads metrics and events, and their senders leave a socket open after ray.shutdown.
    "enable_metrics_collection": False,
    "enable_ray_event": False,
    "task_events_report_interval_ms": 0,
    # How long close() waits for a GCS that was killed, after which Ray ends the driver.
    "gcs_rpc_server_reconnect_timeout_s": 10,
}
"""Settings of a private Ray."""
_GRPC_EXPERIMENTS = "event_engine_client"
"""gRPC's event engine; its older client leaves the sockets of some refused connections open."""
_IN_USE = (
    "another Cluster of this process has a private Ray, which is not shared: close that Cluster "
    "first, or call it from here, or start Ray yourself and give both its address"
)
_LONGEST_SOCKET_PATH = 107 if sys.platform == "linux" else 103
LOCK = threading.RLock()
"""Held while this process looks whether it is connected, connects, or ends its private Ray."""
_has_private_ray = False


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def import_ray() -> Any:
    """Return the ray module, or raise NotImplementedError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise NotImplementedError(
            f"a Cluster needs Ray: pip install 'ray[client]' ({error})"
        ) from error
    return ray


def is_connected() -> bool:
    """Say whether this process is connected to a Ray cluster."""
    return "ray" in sys.modules and bool(import_ray().is_initialized())


def find_connection() -> object | None:
    """Return what stands for this process's connection to Ray, None without one.

    A connection that is made after ``ray.shutdown()`` is another object.
    """
    if not is_connected():
        return None
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        worker: object = client.ray.get_context().client_worker
        return worker
    node: object = import_ray()._private.worker._global_node
    return node


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Run the Python handlers of SIGINT and SIGALRM, which may raise, at the end of the block.

    ``ray.init`` must not be interrupted: the next one would end the process without an exception.
    Python runs handlers on the main thread only, so this does nothing on others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {
        each: handler
        for each in (signal.SIGINT, signal.SIGALRM)
        if callable(handler := signal.getsignal(each))
    }
    for each in handlers:
        signal.signal(each, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number, frame in caught[:1]:
            handlers[number](number, frame)


def connect(address: str | None) -> tuple[Any, Callable[[], None]]:
    """Connect to a running cluster, or join the connection that this process has.

    Returns:
        The ray module, and what undoes the connection (nothing, if it was there before).

    Raises:
        ValueError: if no cluster answers at ``address``, if one is connected already, or if it is
            the private one of another Cluster.
        NotImplementedError: if Ray, or what it needs for ``ray://``, is not installed.
    """
    ray = import_ray()
    if ray.is_initialized() and _has_private_ray:
        raise ValueError(_IN_USE)
    if ray.is_initialized():
        if address is not None:
            raise ValueError(f"Ray is connected already: leave out address, got {address!r}")
        return ray, lambda: None
    address = address or ""
    found = re.fullmatch(r"(?:ray://)?(\[.+\]|[^:/]+):(\d+)", address)
    is_port = found and 0 < int(found[2]) < 2**16  # the resolver would take others modulo 2^16
    if not is_port and address != "auto":
        raise ValueError(f"address must be 'auto', HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        if found:  # Ray itself tries for minutes
            host, port = found[1].strip("[]"), int(found[2])
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        if address.startswith("ray://") and find_spec("grpc") is None:
            raise NotImplementedError(f"{address!r} needs grpcio: pip install 'ray[client]'")
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except NotImplementedError:
        raise
    except (OSError, RuntimeError) as error:
        raise ValueError(f"no Ray cluster answers at address {address!r}: {error}") from error
    ours = find_connection()
    return ray, lambda: ray.shutdown() if find_connection() is ours else None


def start_private_ray(
    num_cpus: int, num_gpus: int, object_store_memory: int | None
) -> tuple[Any, Callable[[], None]]:
    """Start Ray on this machine for this process alone.

    Returns:
        The ray module, and what ends it.

    Raises:
        ValueError: if this process has started one before and not ended it.
    """
    if _has_private_ray:  # ray.shutdown() has ended it, its settings remain
        raise ValueError(_IN_USE)
    ray = import_ray()
    ours: object | None = None

    def shutdown() -> None:
        if ours is None or find_connection() is ours:  # else the user has called ray.shutdown
            ray.shutdown(wait_for_processes=True)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_private_environment(ray))
        folder = stack.enter_context(private_folder())
        stack.callback(_end_processes_in, folder)
        stack.callback(shutdown)
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
                _temp_dir=os.path.join(folder, _RAY_FOLDER),
                _system_config=dict(_CONFIG),  # Ray adds to it
            )
        ours = find_connection()
        undo = stack.pop_all()

    def stop() -> None:
        with LOCK:
            undo.close()

    return ray, stop


def _end_processes_in(folder: str) -> None:
    """Kill what Ray has started in a private directory and, if interrupted, lost track of."""
    import psutil  # comes with Ray

    prefix = os.path.join(folder, _RAY_FOLDER)
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(prefix in argument for argument in process.cmdline()):
                process.kill()
                process.wait()


@contextlib.contextmanager
def _private_environment(ray: Any) -> Iterator[None]:
    """Ask Ray for a token of our own and for no statistics, whatever the user asked it for.

    A new local Ray turns authentication on by itself unless RAY_AUTH_MODE is set; given no token
    it would write one to the home directory, readable by all. It keeps mode and token in the
    process, so it is made to forget them before and after.
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
        if not ray.is_initialized():  # else the user has started another Ray with our token
            _set_environment(before)
            ray._raylet.Config.initialize("")  # first: threads that linger must not miss a token
            ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """Make a directory that other users cannot enter; remove it, and those of killed processes.

    Ray opens its own directory to all users, so it gets a child of this one. The paths of Ray's
    sockets are short enough there.
    """
    parent = tempfile.gettempdir()
    name = f"{_PREFIX}12345678/{_RAY_FOLDER}/{_SESSION}_{os.getpid()}/sockets/plasma_store"
    if len(os.fsencode(os.path.join(parent, name))) > _LONGEST_SOCKET_PATH:
        parent = "/tmp"
    _remove_abandoned(parent)
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        stack.callback(_remove, folder)
        _lock(folder, stack)
        yield folder


def _lock(folder: str, stack: contextlib.ExitStack) -> None:
    """Mark a private directory as in use, until the stack is closed or this process ends.

    The file gets its name once it is locked: nobody ever finds it without a lock while its process
    lives. Where the file system has no locks, the directory is not marked and never removed by
    another process.
    """
    import fcntl

    unnamed = os.path.join(folder, "unlocked")
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    stack.callback(os.close, descriptor)
    os.write(descriptor, _host())
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(unnamed, os.path.join(folder, _LOCK_FILE))


def _remove_abandoned(parent: str) -> None:
    """Remove the private directories in ``parent`` whose processes were killed."""
    with contextlib.suppress(OSError):  # a directory that this user cannot list
        for name in os.listdir(parent):
            if re.fullmatch(re.escape(_PREFIX) + "[a-z0-9_]{8}", name):
                with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                    if _lock_abandoned(folder := os.path.join(parent, name), stack):
                        _remove(folder)


def _lock_abandoned(folder: str, stack: contextlib.ExitStack) -> bool:
    """Say whether a directory belongs to a process of this user and host that was killed.

    It is locked until the stack is closed, so that no other process removes it too.

    Raises:
        OSError: if it is no private directory, is locked, removed, a link or closed to this user.
    """
    import fcntl

    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    stack.callback(os.close, opened)
    lock_file = os.open(_LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=opened)
    stack.callback(os.close, lock_file)
    if not os.stat(opened).st_uid == os.stat(lock_file).st_uid == os.geteuid():
        return False
    if os.read(lock_file, len(_host()) + 1) != _host():
        return False  # locks of other hosts may not be seen here
    fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.path.samestat(os.stat(opened), os.lstat(folder))


def _remove(folder: str) -> None:
    """Remove a private directory, at last the file that says that it is one.

    The Ray of a process that was killed lives on for a moment and may write meanwhile. Then the
    directory keeps that file, and a later start removes it.
    """
    of_ray = os.path.join(folder, _RAY_FOLDER)
    shutil.rmtree(of_ray, ignore_errors=True)
    if not os.path.lexists(of_ray):
        shutil.rmtree(folder, ignore_errors=True)


def _host() -> bytes:
    return os.fsencode(socket.gethostname())


def find_private_folder() -> str | None:
    """Return the private directory of the Ray to which this process is connected, if it has one."""
    folder, name = os.path.split(import_ray()._private.worker._global_node.get_temp_dir_path())
    is_ours = name == _RAY_FOLDER and os.path.basename(folder).startswith(_PREFIX)
    return folder if is_ours else None


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
