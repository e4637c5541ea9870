"""What needs a Ray of its own runs in a fresh process."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

import cqs
from cqs.executors.ray import session

pytestmark = pytest.mark.ray


@contextlib.contextmanager
def start_python(script, folder, **environment):
    """Start a script in a fresh process, whose output is in ``folder / "output"``; kill it at last.

    It has neither the settings of Ray nor the home directory of whoever runs the tests.
    """
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given |= {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=given | {"RAY_USAGE_STATS_ENABLED": "0"} | environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(folder):
    """Wait for the first line that a script prints, and return it."""
    for _ in range(600):
        if line := (folder / "output").read_text().partition("\n")[0]:
            return line
        time.sleep(0.1)
    pytest.fail("nothing is printed")


def run_python(script, folder, **environment):
    """Run a script in a fresh process; return what it printed."""
    with start_python(script, folder, **environment) as process:
        process.wait(240)
    printed = (folder / "output").read_text()
    assert process.returncode == 0, printed
    return printed


@pytest.fixture
def short_folder():
    """A directory whose path leaves room for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def test_the_private_cluster_is_private(tmp_path, short_folder):
    """Also with variables that name another interface; its ranks meet in its directory.

    So do those of a cluster that is opened inside one of its tasks.
    """
    script = """
        import cqs, os, psutil, ray, stat, tempfile, torch, torch.distributed as dist

        for name, addresses in psutil.net_if_addrs().items():
            if not any(each.address.startswith("127.") for each in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name

        def listening():
            own = psutil.Process()
            for process in (own, *own.children(recursive=True)):
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        yield each.laddr.ip

        def find_store(*tensors):
            store = dist.distributed_c10d._get_default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            assert isinstance(store, dist.FileStore), store
            assert stat.S_IMODE(os.stat(os.path.dirname(store.path)).st_mode) == 0o700
            return tensors

        def meet(cluster):
            return cluster.shard(torch.zeros(2), dim=0).map(find_store, is_collective=True).shapes

        def meet_nested():
            with cqs.Cluster(num_workers=1, use_gpus=False) as cluster:
                return meet(cluster)

        query, key, value = (torch.randn(1, 2, 50, 8) for _ in range(3))
        with cqs.Cluster(num_workers=1, cpus_per_worker=3) as cluster:
            output = cluster.attention(query, key, value, num_tasks=3)
            meet(cluster)
            found = [*listening()]
            assert len(found) > 2 and set(found) <= {"127.0.0.1", "::ffff:127.0.0.1"}, found
            assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
            assert os.environ["RAY_AUTH_MODE"] == "token" and os.environ["RAY_AUTH_TOKEN"]
            (name,) = os.listdir(tempfile.gettempdir())
            folder = os.path.join(tempfile.gettempdir(), name)
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            cluster._pool.close()  # makes room
            assert ray.get(ray.remote(num_cpus=1)(meet_nested).remote()) == (((2,),),)
        assert not ray.is_initialized() and not os.path.exists(folder)
        assert not os.path.exists(os.path.expanduser("~/.ray/auth_token"))
        assert torch.allclose(cqs.attention(query, key, value), output, atol=1e-5)
        print("private")
    """
    assert "private" in run_python(script, tmp_path, TMPDIR=str(short_folder))


def test_the_environment_of_the_user_neither_weakens_it_nor_changes(tmp_path):
    """Also a TMPDIR that is too long for the names of Ray's sockets."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    script = """
        import ray, cqs, os, stat, tempfile, torch

        given = {
            "RAY_AUTH_TOKEN": "known to all",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "1",
        }
        assert len(tempfile.gettempdir()) > 80
        os.environ.update(given)
        with cqs.Cluster(num_workers=1) as cluster:
            assert os.environ["RAY_AUTH_MODE"] == "token"
            assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
            assert os.environ["RAY_AUTH_TOKEN"] != given["RAY_AUTH_TOKEN"]
            assert ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
            cluster.attention(*(torch.randn(1, 1, 8, 8) for _ in range(3)))
            folder = os.path.dirname(ray._private.worker._global_node.get_temp_dir_path())
            assert not folder.startswith(tempfile.gettempdir())
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert not os.path.exists(folder)
        assert given == {name: os.environ.pop(name) for name in given}
        assert ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.DISABLED
        print("as before")
    """
    assert "as before" in run_python(script, tmp_path, TMPDIR=str(long))


@contextlib.contextmanager
def holder_of_folder(parent, home):
    """A process that holds a private directory in ``parent``, and the directory."""
    script = """
        import sys
        from cqs.executors.ray import session

        session._REMOVAL_SECONDS = 1
        with session.private_folder() as folder:
            print(folder, flush=True)
            sys.stdin.read()  # until the caller closes it
    """
    home.mkdir()
    with start_python(script, home, TMPDIR=str(parent)) as holder:
        yield holder, first_line(home)
        holder.communicate(timeout=30)


def test_the_directory_of_a_killed_process_is_removed_and_no_other(short_folder, tmp_path):
    baseline = short_folder / f"{session._PREFIX}baseline"
    baseline.mkdir()
    with holder_of_folder(short_folder, tmp_path / "one") as (stopped, held):
        with holder_of_folder(short_folder, tmp_path / "other") as (killed, abandoned):
            os.makedirs(logs := os.path.join(abandoned, session._RAY_FOLDER, "logs"))
            os.kill(stopped.pid, signal.SIGSTOP)
            killed.kill()
        deadline = time.monotonic() + 30
        for _ in range(2):
            while os.path.exists(abandoned) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.makedirs(logs)  # a server of Ray still writes
        while os.path.exists(abandoned) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert set(short_folder.iterdir()) == {baseline, pathlib.Path(held)}
        os.kill(stopped.pid, signal.SIGCONT)
    assert list(short_folder.iterdir()) == [baseline]


def test_opening_and_closing_leaves_nothing_behind(tmp_path, short_folder):
    """Twice: libraries keep some descriptors from their first use on."""
    script = """
        import cqs, glob, os, ray, tempfile, torch

        def children(task):
            try:
                return open(task).read().split()
            except OSError:  # the thread has ended
                return []

        def held():
            tasks = glob.glob("/proc/self/task/*/children")
            links = map(os.readlink, filter(os.path.islink, glob.glob("/proc/self/fd/*")))
            kinds = [link.partition(":")[0] for link in links if not link.endswith("(deleted)")]
            return {
                "descriptors": sorted(kinds),
                "processes": [pid for task in tasks for pid in children(task)],
                "shared memory": [name for name in os.listdir("/dev/shm") if "plasma" in name],
                "files": os.listdir(tempfile.gettempdir()),
            }

        query, key, value = (torch.randn(1, 2, 50, 8) for _ in range(3))
        with cqs.Cluster() as cluster:
            output = cluster.attention(query, key, value, num_tasks=7)
        assert torch.allclose(output, cqs.attention(query, key, value), atol=1e-5)
        assert not ray.is_initialized()
        before = held()
        with cqs.Cluster(num_workers=1, use_gpus=False) as cluster:
            cluster.attention(query, key, value, num_tasks=3)
            cluster.attention(cluster.shard(query, key, value)).to_local()
        assert held() == before, (held(), before)
        assert before["files"] == before["processes"] == [], before
        print("nothing")
    """
    assert "nothing" in run_python(script, tmp_path, TMPDIR=str(short_folder))


@pytest.mark.long
def test_ray_ends_the_driver_if_its_gcs_server_is_killed(tmp_path):
    script = """
        import cqs, ray

        cluster = cqs.Cluster(num_workers=1, use_gpus=False)
        ray._private.worker._global_node.all_processes["gcs_server"][0].process.kill()
        cluster.close()
    """
    with start_python(script, tmp_path) as driver:
        assert driver.wait(100) == 1
    assert "Traceback" not in (tmp_path / "output").read_text()


@pytest.mark.long
def test_calls_are_right_until_ray_misses_a_killed_raylet(tmp_path):
    script = """
        import cqs, psutil, pytest, ray, torch

        cluster = cqs.Cluster(num_workers=1, use_gpus=False, start_timeout=20)
        tensors = [torch.randn(1, 2, 50, 8) for _ in range(3)]
        expected = cluster.attention(*tensors)
        ray._private.worker._global_node.all_processes["raylet"][0].process.kill()
        with pytest.raises(RuntimeError, match="all 1 workers failed"):
            while True:
                assert torch.equal(cluster.attention(*tensors), expected)
        cluster.close()
        print("left:", psutil.Process().children(recursive=True))
    """
    assert "left: []" in run_python(script, tmp_path)


@pytest.mark.long
def test_an_interrupted_start_or_close_leaves_nothing_behind(tmp_path, short_folder):
    """Ray loses track of its processes where its start is interrupted.

    And of its core worker, once that is made: it would abort the process in its next start.
    """
    script = """
        import cqs, os, ray, psutil, signal, tempfile, time, torch

        def nothing_is_left():
            children = psutil.Process().children(recursive=True)
            assert not (children or ray.is_initialized()), (children, ray.is_initialized())
            assert not os.listdir(tempfile.gettempdir()), os.listdir(tempfile.gettempdir())

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        def start():
            try:
                cqs.Cluster(num_workers=1, use_gpus=False)
            except KeyboardInterrupt:
                nothing_is_left()
                print("start", flush=True)

        node = ray._private.node.Node
        for name in ("_record_stats", "start_ray_processes"):
            method = getattr(node, name)
            setattr(node, name, interrupt)
            start()
            setattr(node, name, method)

        class Interrupting(ray._raylet.CoreWorker):
            def __init__(self, *args):
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        ray._raylet.CoreWorker = Interrupting
        start()
        ray._raylet.CoreWorker = Interrupting.__base__
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        cluster, query = cqs.Cluster(num_workers=1, use_gpus=False), torch.randn(1, 2, 50, 8)
        cluster.attention(query, query, query, verify=True)
        remove = ray.util.remove_placement_group

        def interrupt_and_remove(group):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
            remove(group)

        ray.util.remove_placement_group = interrupt_and_remove
        try:
            cluster.close()
        except KeyboardInterrupt:
            cluster.close()
            nothing_is_left()
            print("close")
    """
    found = run_python(script, tmp_path, TMPDIR=str(short_folder))
    assert found.split() == ["start"] * 3 + ["close"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_private", "when"), [(True, "between calls"), (True, "in a call"), (False, "in a call")]
)
def test_a_cluster_whose_ray_was_shut_down_starts_and_ends_no_other(tmp_path, is_private, when):
    """Ray's functions start a Ray that is not private by themselves where there is none."""
    script = f"""
        import cqs, os, ray, torch

        def refuses(call):
            try:
                call()
            except ValueError as error:
                assert "lost its connection to Ray" in str(error), error
            else:
                raise AssertionError(call)

        def start():
            ray.init(address="local", num_cpus=1, include_dashboard=False)

        if not {is_private}:
            start()
        query = torch.randn(1, 2, 50, 8)
        cluster = cqs.Cluster(num_workers=1, use_gpus=False)
        sharded = cluster.shard(query, query, query)
        if {when!r} == "in a call":
            future = cluster.submit(
                query, query, query, num_tasks=3, progress=lambda *_: ray.shutdown()
            )
            refuses(future.result)
        else:
            ray.shutdown()
        for _ in range(2):
            refuses(lambda: cluster.attention(query, query, query))
            refuses(lambda: cluster.submit(query, query, query))
            refuses(lambda: cluster.shard(query))
            refuses(lambda: cluster.attention(sharded))
            refuses(sharded.to_local)
            if not ray.is_initialized():
                start()
                kept = ray.put("kept")
        if {is_private}:
            try:
                cqs.Cluster(num_workers=1, use_gpus=False)
            except ValueError as error:
                assert "another Cluster" in str(error), error
        cluster.close()
        assert ray.get(kept) == "kept"
        assert ray.get(ray.remote(lambda: 1).remote()) == 1
        print("kept")
    """
    assert "kept" in run_python(script, tmp_path)


def test_a_second_cluster_raises_until_the_first_is_closed(tmp_path):
    """Every thread that closes it waits for that; one that cuts sequences meanwhile gets an error.

    Ray ends a process, or starts anew, where something is put into a store that is gone.
    """
    script = """
        import concurrent.futures, cqs, ray, threading, time, torch

        tensors = [torch.randn(1, 1, 8, 8) for _ in range(3)]
        first, start = cqs.Cluster(num_workers=1), time.monotonic()
        for second in (
            lambda: cqs.Cluster(num_workers=1),
            lambda: cqs.Cluster(num_workers=1, address="auto"),
        ):
            try:
                second()
            except ValueError as error:
                assert "another Cluster of this process has a private Ray" in str(error), error
                assert "close that Cluster" in str(error) and "address" in str(error), error
                print("raised")
        assert time.monotonic() - start < 3
        first.attention(*tensors, verify=True)

        put, remove, ended = ray.put, ray.util.remove_placement_group, []
        ray.put = lambda value: (time.sleep(1), put(value))[1]
        ray.util.remove_placement_group = lambda group: (time.sleep(1), remove(group))

        def cut():
            try:
                while True:
                    first.shard(torch.zeros(1, 1, 8, 2))
            except (ValueError, concurrent.futures.CancelledError):
                ended.append("cut")

        def close():
            time.sleep(0.5)
            first.close()
            ended.append(ray.is_initialized())

        threads = [threading.Thread(target=call) for call in (cut, close, close, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(map(str, ended)) == ["False"] * 3 + ["cut"], ended
    """
    assert run_python(script, tmp_path).count("raised") == 2


@pytest.mark.parametrize("scheme", ["", "ray://"])
@pytest.mark.parametrize("place", ["127.0.0.1:1", "127.0.0.1:99999", "nowhere", "local"])
def test_no_cluster_at_an_address_is_named(monkeypatch, place, scheme):
    """Given as an argument, or as ``RAY_ADDRESS`` of a cluster that was stopped or killed."""
    monkeypatch.setattr("cqs.executors.ray.session.is_connected", lambda: False)  # by other tests
    monkeypatch.setenv("RAY_ADDRESS", f"{scheme}{place}")
    for address in ("auto", f"{scheme}{place}"):
        with pytest.raises(ValueError, match=f"^address must be .*, got '{address}'"):
            cqs.Cluster(num_workers=1, address=address)


@pytest.mark.long
def test_ray_client_gives_right_answers_and_survives_a_failure(tmp_path):
    pytest.importorskip("grpc")
    script = """
        import os, signal, socket, time, torch, cqs
        from ray.cluster_utils import Cluster as Nodes
        from benchmarks.cases import Case

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        node = dict(num_cpus=3, object_store_memory=200 * 2**20, include_dashboard=False)
        nodes = Nodes(initialize_head=True, head_node_args=node | {"ray_client_server_port": port})

        problem = Case("client", 3000, 3000, 8, 8, 64, is_causal=True).make()
        tensors = problem.query, problem.key, problem.value
        expected = cqs.attention(*tensors, is_causal=True, num_tasks=13)
        for attempt in range(30):
            try:
                cluster = cqs.Cluster(num_workers=2, address=f"ray://127.0.0.1:{port}")
                break
            except ValueError as error:  # Ray's proxy gives its servers little time to start
                faults = "Starting Ray client server failed", "Initialization failure from server"
                faults += ("Connection refused",)
                if attempt == 29 or not any(fault in str(error) for fault in faults):
                    raise
                time.sleep(1)
        with cluster:
            results = []

            def strike(done, total):
                results.append(done)
                if len(results) == 2:
                    os.kill(cluster.pids[0], signal.SIGKILL)
            future = cluster.submit(*tensors, is_causal=True, num_tasks=13, progress=strike)
            output = future.result(timeout=100)
            assert len(future.report.failures) == 1
            again = cluster.attention(*tensors, is_causal=True, num_tasks=13, verify=True)
            assert torch.equal(output, again)
            torch.testing.assert_close(output, expected)
            try:
                cluster.attention(*tensors, num_tasks=3, backend="cudnn")
            except NotImplementedError as error:
                print(error)
        import ray
        assert not ray.is_initialized()
        nodes.shutdown()
    """
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "c" * 64}
    assert "requires CUDA tensors" in run_python(script, tmp_path, **environment)


def test_ray_client_without_grpcio_is_named(tmp_path):
    script = """
        import socket, sys
        sys.modules["grpc"] = None
        import cqs
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"ray://127.0.0.1:{server.getsockname()[1]}"
            try:
                cqs.Cluster(address=address)
            except NotImplementedError as error:
                assert repr(address) in str(error) and "grpcio" in str(error), error
                print("named")
    """
    assert "named" in run_python(script, tmp_path)


@pytest.mark.long
def test_a_killed_node_does_not_change_a_bit(tmp_path):
    script = """
        import os, torch, cqs, ray
        from ray.cluster_utils import Cluster as Nodes
        from benchmarks.cases import Case

        problem = Case("node", 4000, 4000, 8, 8, 64, is_causal=True).make()
        tensors = problem.query, problem.key, problem.value
        node = dict(num_cpus=2, object_store_memory=150 * 2**20)
        nodes = Nodes(initialize_head=True, head_node_args=dict(node, include_dashboard=False))
        doomed = nodes.add_node(**node)
        nodes.wait_for_nodes()
        with cqs.Cluster(num_workers=4, address=nodes.address, stall_timeout=30) as cluster:
            expected = cluster.attention(*tensors, is_causal=True, num_tasks=13, verify=True)
            sharded = cluster.attention(cluster.shard(*tensors), is_causal=True)
            before = sharded.to_local()
            torch.testing.assert_close(before, expected)
            raylets = sharded.map(lambda _: torch.tensor([os.getppid()])).to_local(dim=0).tolist()
            first, second, third, fourth = raylets
            assert first == second != third == fourth, "ranks of a node are neighbours"

            results = []

            def strike(done, total):
                results.append(done)
                if len(results) == 11:  # parts that its workers returned are lost too
                    nodes.remove_node(doomed, allow_graceful=False)
            future = cluster.submit(*tensors, is_causal=True, num_tasks=13, progress=strike)
            assert torch.equal(future.result(timeout=150), expected)
            assert len(future.report.failures) >= 2, future.report
            print("bitwise identical after", len(future.report.failures), "failures")
            nodes.add_node(**{**node, "num_cpus": 3})
            assert torch.equal(sharded.to_local(), before)
        assert not ray.is_initialized(), "it connected, so it disconnects"
        nodes.shutdown()
    """
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "n" * 64}
    assert "bitwise identical" in run_python(script, tmp_path, **environment)


@pytest.mark.long
def test_the_memory_monitor_does_not_change_a_bit(tmp_path):
    script = """
        import os, pathlib, time
        memory = dict(line.split(":") for line in open("/proc/meminfo"))
        total, free = (int(memory[k].split()[0]) * 1024 for k in ("MemTotal", "MemAvailable"))
        room = 4 * 2**30
        os.environ["RAY_memory_usage_threshold"] = str((total - free + room) / total)
        os.environ["RAY_memory_monitor_refresh_ms"] = "250"
        import torch, cqs
        from benchmarks.cases import Case
        from cqs.executors.ray.actor import TaskActor

        class Greedy(TaskActor):
            def run(self, settings, calls, *arguments):
                mark = pathlib.Path("MARK")
                if any(call.task.index == 3 for call in calls) and not mark.exists():
                    mark.touch()
                    hoard = []
                    while len(hoard) < 36:  # 9 GiB, if nobody stops it
                        hoard.append(torch.ones(2**26))
                    time.sleep(120)
                return super().run(settings, calls, *arguments)

        class GreedyCluster(cqs.Cluster):
            actor_class = Greedy

        problem = Case("greedy", 1000, 1000, 8, 8, 64).make()
        tensors = problem.query, problem.key, problem.value
        # Ray shoots bystanders too, and again while memory comes back.
        with GreedyCluster(
            num_workers=3, object_store_memory=100 * 2**20, max_attempts=20
        ) as cluster:
            future = cluster.submit(*tensors, num_tasks=7)
            output = future.result(timeout=100)
            assert torch.equal(output, cluster.attention(*tensors, num_tasks=7, verify=True))
            print("bitwise identical after", len(future.report.failures), "failures")
    """.replace("MARK", str(tmp_path / "mark"))
    assert "bitwise identical after" in run_python(script, tmp_path)
    assert (tmp_path / "mark").exists()


@pytest.mark.sample(99)
@pytest.mark.parametrize("call", ["cluster.attention(*tensors, num_tasks=13)", "sharded.map(idle)"])
def test_workers_end_with_a_driver_that_is_killed(tmp_path, call):
    script = f"""
        import time, torch, cqs

        def idle(*tensors):
            time.sleep(600)

        with cqs.Cluster(num_workers=2) as cluster:
            tensors = [torch.randn(1, 8, 16384, 64) for _ in range(3)]
            sharded = cluster.shard(*(tensor[:, :, :64] for tensor in tensors))
            print(*cluster.pids, flush=True)
            {call}
    """
    with start_python(script, tmp_path) as driver:
        pids = first_line(tmp_path).split()
        assert len(pids) == 2
        time.sleep(1)  # it calls
        driver.kill()
    end = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end, f"{pids} are still there"
        time.sleep(0.2)
