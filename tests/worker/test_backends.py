from dataclasses import dataclass, replace

import pytest
import torch
from support import exact
from support.layouts import LAYOUTS

import cqs
from benchmarks.cases import CASES
from cqs.patterns import sliding_window
from cqs.problem.dropout import Dropout
from cqs.scheduler import Step, Task, make_plan
from cqs.worker import BACKENDS, HeldTokens, Worker, choose_backend

GPU = pytest.mark.gpu
SINGLE = (torch.float32, torch.bfloat16, torch.float16)
COMBINATIONS = [
    *(("cpu", "cpu", dtype) for dtype in SINGLE),
    *(("cpu", "reference", dtype) for dtype in (*SINGLE, torch.float64)),
    *(("cpu", "triton", dtype) for dtype in (torch.float32, torch.float16)),
    *(("cuda", "triton", dtype) for dtype in SINGLE),
    *(("cuda", name, dtype) for name in ("cudnn", "flash") for dtype in SINGLE[1:]),
    *(("cuda", "reference", dtype) for dtype in (*SINGLE, torch.float64)),
]
every_combination = pytest.mark.parametrize(
    ("device", "backend", "dtype"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{str(case[2]).removeprefix('torch.')}",
            marks=[GPU] if case[0] == "cuda" else [],
        )
        for case in COMBINATIONS
    ],
)
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
SQUARE = replace(CASES[1], head_dim=32)


def attend(problem, backend, num_tasks=1, **options):
    """Attend on a backend, or skip with the reason for which a library does not take a call."""
    try:
        return exact.attend(problem, backend=backend, num_tasks=num_tasks, **options)
    except NotImplementedError as reason:
        if backend in ("cpu", "reference"):
            raise
        pytest.skip(str(reason))


@pytest.mark.sample(3)
@every_combination
@every_case
def test_one_call_is_right(assert_right, case, device, backend, dtype):
    """Backends know causal squares only, so other shapes are full. Inputs are only read."""
    is_causal = case.is_causal and case.seqlen_q == case.seqlen_kv
    problem = replace(case, is_causal=is_causal).make(dtype, device)
    tensors = problem.query, problem.key, problem.value
    before = [tensor.clone() for tensor in tensors]
    output, lse = attend(problem, backend)
    assert all(map(torch.equal, tensors, before))
    assert output.device == lse.device == problem.query.device
    assert_right(problem, (output, lse))


@pytest.mark.slow
@every_combination
def test_strides_of_the_inputs_do_not_matter(device, backend, dtype):
    problem = SQUARE.make(dtype, device)
    expected_output, expected_lse = attend(problem, backend)
    for name, store in LAYOUTS.items():
        query, key, value = map(store, (problem.query, problem.key, problem.value))
        output, lse = attend(replace(problem, query=query, key=key, value=value), backend)
        torch.testing.assert_close(output, expected_output, msg=lambda text, name=name: name + text)
        torch.testing.assert_close(lse, expected_lse)


@every_combination
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scales_that_are_not_positive_are_honoured(
    assert_right, scale, is_causal, device, backend, dtype
):
    problem = replace(SQUARE.make(dtype, device), is_causal=is_causal, scale=scale)
    # The same scores with a positive scale, which eager PyTorch needs for its causal mask.
    same = replace(problem, query=(-1 if scale else 0) * problem.query, scale=abs(scale) or 1.0)
    assert_right(same, attend(problem, backend))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 96, 128])
@pytest.mark.parametrize("lengths", [(1, 2), (7, 513), (128, 128), (300, 65)], ids=str)
def test_cudnn_takes_rectangles_of_any_size(assert_right, lengths, head_dim, dtype):
    case = replace(CASES[0], seqlen_q=lengths[0], seqlen_kv=lengths[1], head_dim=head_dim)
    for is_causal in {False, lengths[0] == lengths[1]}:
        problem = replace(case, is_causal=is_causal).make(dtype, "cuda")
        assert_right(problem, attend(problem, "cudnn"))


@dataclass(frozen=True)
class TensorLike:
    """What a backend looks at before it declines."""

    shape: tuple[int, ...] = (1, 4, 100, 64)
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU, cuDNN and flash-attn-4, as far as anyone tells."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr("cqs.worker.flash._why_not_importable", lambda: None)
    return monkeypatch


REFUSALS = [
    ("cpu", {"device": torch.device("cuda", 0)}, "requires CPU tensors, got cuda:0"),
    ("cudnn", {"dtype": torch.float32}, "got torch.float32"),
    ("cudnn", {"dtype": torch.float64}, "got torch.float64"),
    ("cudnn", {"shape": (1, 4, 100, 136)}, "multiple of 8 up to 128, got 136"),
    ("cudnn", {"shape": (1, 4, 100, 20)}, "multiple of 8 up to 128, got 20"),
    ("flash", {"shape": (1, 4, 100, 16)}, "multiple of 32 up to 256, got 16"),
    ("flash", {"shape": (1, 4, 100, 288)}, "multiple of 32 up to 256, got 288"),
    ("cudnn", {"shape": (1, 4, 1, 64)}, "more than one key, got 1"),
    ("cudnn", {"shape": (65536, 4, 9, 64)}, r"up to 65535, got (65536, 4)"),
    ("cudnn", {"capability": (7, 5)}, "8.0 or later, got 7.5"),
    ("flash", {"capability": (8, 0)}, "requires compute capability 9.x to 11.x, got 8.0"),
    ("flash", {"capability": (12, 0)}, "requires compute capability 9.x to 11.x, got 12.0"),
    (
        "flash",
        {"capability": (10, 0), "shape": (1, 4, 100, 192)},
        "requires a head_dim up to 128 on this GPU, got 192",
    ),
]


@pytest.mark.parametrize(("backend", "change", "reason"), REFUSALS, ids=str)
def test_a_backend_says_why_it_declines(hopper, backend, change, reason):
    change = dict(change)
    capability = change.pop("capability", (9, 0))
    sound = TensorLike(device=torch.device("cpu" if backend == "cpu" else "cuda"))
    assert BACKENDS[backend].why_not(sound, sound, sound) is None
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    other = replace(sound, **change)
    assert reason in BACKENDS[backend].why_not(other, other, other)
    with pytest.raises(NotImplementedError) as raised:
        choose_backend(other, other, other, backend)
    assert repr(backend) in str(raised.value) and reason in str(raised.value)


def test_libraries_decline_what_they_lack(hopper):
    tensor, value = TensorLike(), TensorLike(shape=(1, 4, 100, 32))
    assert "got 64 and 32" in BACKENDS["cudnn"].why_not(tensor, tensor, value)
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    wide = TensorLike(shape=(1, 4, 100, 128))
    assert BACKENDS["flash"].why_not(wide, wide, wide) is None
    hopper.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert "built with cuDNN" in BACKENDS["cudnn"].why_not(tensor, tensor, tensor)


@pytest.mark.parametrize(
    ("tensor", "best"),
    [
        (TensorLike(), "triton"),
        (TensorLike(dtype=torch.float32), "triton"),
        (TensorLike(dtype=torch.float64), "reference"),
        (TensorLike(device=torch.device("cpu")), "cpu"),
        (TensorLike(device=torch.device("cpu"), dtype=torch.float64), "reference"),
    ],
    ids=["cuda-bfloat16", "cuda-float32", "cuda-float64", "cpu-bfloat16", "cpu-float64"],
)
def test_the_best_backend_that_can_is_chosen(hopper, tensor, best):
    assert choose_backend(tensor, tensor, tensor).name == best
    assert choose_backend(tensor, tensor, tensor, "reference").name == "reference"


def test_flash_is_the_best_for_work_that_is_one_call(hopper):
    tensor = TensorLike()
    whole, part = (make_plan(100, num_tasks=w).task(0).steps for w in (1, 7))
    assert Worker(1.0).choose_backend(tensor, tensor, tensor, whole).name == "flash"
    assert Worker(1.0).choose_backend(tensor, tensor, tensor, part).name == "triton"
    dropping = Worker(1.0, dropout=Dropout(0.5, 1))
    assert dropping.choose_backend(tensor, tensor, tensor, whole).name == "triton"
    hopper.setattr("cqs.worker.flash._why_not_importable", lambda: "requires the package")
    assert Worker(1.0).choose_backend(tensor, tensor, tensor, whole).name == "triton"


def test_the_reference_computes_a_call_of_too_few_keys(monkeypatch):
    """As cuDNN declines a single key: other calls of the task are not affected."""
    cpu, sizes = BACKENDS["cpu"], []
    attend = cpu.attend
    monkeypatch.setattr(type(cpu), "least_keys", 2)
    monkeypatch.setattr(
        cpu, "attend", lambda call, *rest: sizes.append(call.key.shape[2]) or attend(call, *rest)
    )
    problem = CASES[0].make()
    step = Step(0, range(0, 2), (range(5, 6),), range(0, 2), 5)
    task = Task(0, (0,), (range(0, 2),), (range(0, 2), range(5, 6)), (step,))
    held = map(HeldTokens.whole, (problem.query, problem.key, problem.value))
    (partial,) = Worker(0.25).run_steps(task.steps, *held)
    scores = 0.25 * problem.query[:, :, :2] @ problem.key[:, :, [0, 1, 5]].mT
    scores[:, :, 0, 1] = -torch.inf
    torch.testing.assert_close(partial.output, scores.softmax(-1) @ problem.value[:, :, [0, 1, 5]])
    assert sizes == [2]


def test_a_named_backend_does_not_fall_back_within_a_task():
    problem = CASES[0].make(torch.float64)
    task = problem.make_plan(3).task(0)
    held = [HeldTokens.whole(t) for t in (problem.query, problem.key, problem.value)]
    with pytest.raises(NotImplementedError, match="'cpu' requires .* got torch.float64"):
        Worker(1.0, "cpu").run_steps(task.steps, *held)


@pytest.fixture
def deterministic():
    """Return a function that requires deterministic algorithms until the test ends."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


def test_cudnn_is_declined_where_deterministic_algorithms_are_required(hopper, deterministic):
    tensor = TensorLike()
    assert BACKENDS["cudnn"].why_not(tensor, tensor, tensor) is None
    deterministic()
    reason = BACKENDS["cudnn"].why_not(tensor, tensor, tensor)
    assert "requires torch.use_deterministic_algorithms(False)" in reason


@pytest.mark.parametrize("backend", [None, "reference"])
def test_results_do_not_depend_on_deterministic_algorithms(backend, deterministic):
    tensors = [torch.randn(2, 4, 100, 16, requires_grad=True) for _ in range(3)]
    options = {"num_tasks": 7, "pattern": sliding_window(30), "backend": backend}

    def differentiate():
        output = cqs.attention(*tensors, **options)
        return output, *torch.autograd.grad(output.square().sum(), tensors)

    plain = differentiate()
    deterministic()
    assert all(map(torch.equal, plain, differentiate()))
