"""Seeds, the skip of GPU tests without a GPU, and the one check of an answer."""

import math
import os
import signal
import sys
import time
import zlib

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
os.environ["MPLBACKEND"] = "agg"

from support.bitwise import digest
from support.exact import assert_answers

import cqs
from cqs.worker import units

signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore it

SHARED = "ray", "ranks"
"""Groups of pytest-xdist whose tests share processes. Every other file is a group of its own."""
RANKS = {"ranks", "mesh_ranks", "gpu_ranks", "crowded_ranks"}


def group_of(item):
    """Return the group of a test: all tests of a group run in one process."""
    if item.get_closest_marker("ray"):
        return "ray"
    if RANKS & set(getattr(item, "fixturenames", ())):
        return "ranks"
    return item.nodeid.partition("::")[0]


def pytest_ignore_collect(collection_path):
    """Modules that tests import have no examples, and some are programs that change PyTorch."""
    return collection_path.suffix == ".py" and not collection_path.name.startswith("test_") or None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark as ``long`` all cases of a test marked ``sample(n)`` except the first and one in n.

    The groups that share processes take longest, and come first.
    """
    sampled, groups = set(), {item: group_of(item) for item in items}
    items.sort(key=lambda item: [*SHARED, groups[item]].index(groups[item]))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item]))
        if groups[item] == "ranks":
            item.add_marker("slow")  # eight processes start
        if marker := item.get_closest_marker("sample"):
            test = item.nodeid.partition("[")[0]
            if test in sampled and zlib.crc32(item.nodeid.encode()) % marker.args[0]:
                item.add_marker("long")
            sampled.add(test)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Replace what is no text in captured output: processes of pytest-xdist pass text alone."""
    report = yield
    sections = [(name, text.encode(errors="replace")) for name, text in report.sections]
    report.sections = [(name, text.decode()) for name, text in sections]
    return report


def pytest_addoption(parser):
    parser.addoption("--until", type=float, help="seconds since 1970 after which no test begins")


def pytest_runtest_setup(item):
    if time.time() > (item.config.getoption("--until") or math.inf):
        pytest.skip("left to make test-all: the time is over")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seeded():  # not "seed": a parameter of that name would replace it
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def fresh_compiler():
    """``torch.compile`` knows no code of other tests, and none of this one afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def record_bits(record_property):
    """Write a hash of results into the report of ``--junitxml``: see support/bitwise.py."""
    return lambda *results: record_property("bits", digest(*results))


@pytest.fixture
def assert_right(record_bits):
    """Check an output and an lse against float64; rows that see no key must give 0 and -inf."""

    def check(problem, answer):
        record_bits(*answer)
        assert_answers(problem, *answer)

    return check


@pytest.fixture
def one_thread():
    """PyTorch has one thread at first, and as many as before after the test.

    Kernels of the CPU take scratch for each thread, which no plan can know.
    """
    with units.one_thread():
        yield


@pytest.fixture(scope="session")
def ray_session():
    """A Ray of the caller's own with four GPUs that do not exist: clusters join and leave it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", "t" * 64)
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=12,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=400 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def cluster(ray_session):
    with cqs.Cluster(num_workers=4, use_gpus=False, stall_timeout=60) as cluster:
        yield cluster


def processes(*arguments):
    """Yield processes of one group, and stop them."""
    from ranks import Ranks

    ranks = Ranks(*arguments)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks():
    """Eight processes of one group."""
    yield from processes()


@pytest.fixture(scope="session")
def mesh_ranks(ranks):
    """The same processes, which have made meshes of some of them."""
    from models import make_meshes

    ranks.run(8, make_meshes)
    return ranks


@pytest.fixture(scope="session")
def gpu_ranks():
    """A process for each GPU, of one group."""
    yield from processes(torch.cuda.device_count(), "cuda")


@pytest.fixture(scope="session")
def crowded_ranks():
    """Eight processes of one group that share the GPUs, of which there are fewer."""
    yield from processes(8, "cuda")
