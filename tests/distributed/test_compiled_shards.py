"""``torch.compile`` keeps attention over the shards of two ranks in one graph."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from programs import raised
from support.options import grouped
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.library import opcheck
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

import cqs.distributed
from cqs.patterns import documents, sliding_window
from cqs.patterns.handle import _memories
from cqs.scheduler import Grid2D
from tests.test_compile import CALLS_ANYWHERE

pytestmark = pytest.mark.slow

SHAPES = ((2, 4), (2, 2), (2, 2))
CALLS = CALLS_ANYWHERE | {
    "plan": {"plan": Grid2D(1, 1), "head_parallel": 2, "num_chunks": 1, "links": (1e9, 1e-5)},
    "max_bytes": {"max_bytes": 60_000, "is_causal": True},
}


def operands(rows, dtype=torch.float64, num_joint=0):
    """Query, key and value with different numbers of rows on different ranks, and joint tokens."""
    generator, of_all = torch.manual_seed(dist.get_rank()), torch.Generator().manual_seed(1)
    drawn = [torch.randn(*shape, rows, 8, dtype=dtype, generator=generator) for shape in SHAPES]
    if num_joint:
        shapes = [(*shape, num_joint, 8) for shape in SHAPES]
        drawn += [torch.randn(shape, dtype=dtype, generator=of_all) for shape in shapes]
    return [each.requires_grad_() for each in drawn]


def with_names(tensors):
    """Return query, key and value, and the joint tensors by name."""
    names = "joint_query", "joint_key", "joint_value"
    return tensors[:3], dict(zip(names, tensors[3:], strict=False))


def results(attend, tensors, *others):
    torch.manual_seed(dist.get_rank())  # ranks draw different seeds
    found = attend(*tensors, *others)
    outputs = found if isinstance(found, tuple) else (found,)
    return *outputs, *torch.autograd.grad(outputs[0].square().sum(), tensors)


def differences(found, expected):
    """Return the largest difference of each result."""
    pairs = zip(found, expected, strict=True)
    return [(one - other).abs().max().item() for one, other in pairs]


def compile_whole(function):
    """Compile a function to one graph, without a compiler that takes long."""
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def layer(*tensors, **options):
    (query, key, value), joint = with_names(tensors)
    options = grouped(joint | options)
    found = cqs.distributed.attention(query.sin(), key * 2, value, **options)
    return (found[0].cos(), found[1]) if options.get("return_lse") else found.cos()


def choose(context, operator, *args, **kwargs):
    is_attention = operator is torch.ops.cqs.sharded_attention.default
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def compare(group, options, recomputed="nothing", num_joint=(0, 0)):
    """Return the largest differences of compiled passes from eager ones.

    Args:
        group: The process group.
        options: Options of the call.
        recomputed: What is recomputed in the backward pass: "nothing", "all" or "selected".
        num_joint: Number of joint tokens in each pass.
    """
    attend = eager = partial(layer, group=group, **options)
    if recomputed != "nothing":
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, choose)
        chosen = {"context_fn": contexts} if recomputed == "selected" else {}
        attend = partial(checkpoint.checkpoint, attend, use_reentrant=False, **chosen)
    compiled, found = compile_whole(attend), []
    if "pattern" in options:
        options["pattern"].handle  # noqa: B018
    held = len(_memories)
    for number in num_joint:
        tensors = operands(17 + 6 * dist.get_rank(), num_joint=number)
        found += differences(results(compiled, tensors), results(eager, tensors))
    assert len(_memories) <= held, "a backward pass has kept the tensors of its forward pass"
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_graph_has_the_whole_call(ranks, options):
    """Bitwise identical to an eager call, in a second run of the graph too."""
    for differences in ranks.run(2, compare, options):
        assert max(differences) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "joint_position": "rear", "return_lse": True}],
    ids=["full", "causal"],
)
def test_a_graph_has_joint_tokens(ranks, options):
    """Also other numbers of them than in the first pass."""
    for differences in ranks.run(2, compare, options, num_joint=(5, 5, 7)):
        assert max(differences) == 0


def compare_in_autocast(group, num_joint):
    """Return whether calls and prepared calls in autocast, and compiled ones, cast their inputs."""
    tensors = operands(17 + 6 * dist.get_rank(group), torch.float32, num_joint)
    tensors[2] = tensors[2].detach().bfloat16().requires_grad_()

    def call_with_names(function, *tensors, **options):
        shards, joint = with_names(tensors)
        return function(*shards, **grouped(joint | options))

    attend = partial(call_with_names, cqs.distributed.attention, group=group)
    cast = [each.bfloat16() for each in tensors]
    prepared = call_with_names(cqs.distributed.prepare, *cast, group=group)
    expected = results(lambda *each: attend(*(one.bfloat16() for one in each)), tensors)
    calls = attend, compile_whole(attend), partial(call_with_names, prepared)
    with torch.autocast("cpu", torch.bfloat16):
        found = [results(call, tensors) for call in calls]
    return [all(map(torch.equal, each, expected)) for each in found]


@pytest.mark.parametrize("num_joint", [0, 5])
def test_autocast_casts_what_it_casts_for_sdpa(ranks, num_joint):
    """In calls, compiled calls and prepared calls."""
    assert ranks.run(2, compare_in_autocast, num_joint) == [[True] * 3] * 2


@pytest.mark.parametrize("recomputed", ["all", "selected"])
def test_activation_checkpointing(ranks, recomputed):
    options = {"is_causal": True, "dropout_p": 0.2}
    for differences in ranks.run(2, compare, options, recomputed):
        assert max(differences) == 0


def count_graphs(group):
    """Return the number of graphs after calls with new lengths and documents."""
    torch._dynamo.utils.counters.clear()

    def attend(query, key, value, pattern):
        return layer(query, key, value, group=group, pattern=pattern)

    compiled, found = compile_whole(attend), []
    for rows in (9, 10, 13, 17):
        tokens = 2 * rows + 1
        tensors, pattern = operands(rows + dist.get_rank()), documents([0, tokens // 3, tokens])
        expected = results(attend, tensors, pattern)
        assert all(map(torch.equal, results(compiled, tensors, pattern), expected))
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found


def test_new_lengths_and_patterns_do_not_recompile(ranks):
    for found in ranks.run(2, count_graphs):
        assert found[1:] == [found[1]] * 3


def check_operator(group):
    """Run opcheck on the operator and its backward pass; the default group has more ranks."""
    window = sliding_window(5)
    handle, seed = window.handle, torch.tensor(3)
    options = True, True, 2.0, False, 0.3, "1", None, "rows", [1e9, 1e-5], 10**6, None, True, False
    tensors = operands(9)
    shapes = [list(each.shape) for each in tensors]
    where = (None, None, handle, seed, False, *options, group.group_name, "front", [0, 0])
    operator = torch.ops.cqs.sharded_attention.default
    backward = torch.ops.cqs.sharded_attention_backward.default
    opcheck(operator, (*(each.detach() for each in tensors), None, *where, False, 0))
    for sinks in (None, torch.zeros(tensors[0].shape[1], requires_grad=True)):
        opcheck(operator, (*tensors, sinks, *where, True, 1))
        output, _, state = operator(*tensors, sinks, *where, True, 1)
        of_sinks = None if sinks is None else sinks.detach()
        opcheck(backward, (output.detach(), state, of_sinks, None, *shapes))


def test_the_operator_passes_opcheck(ranks):
    ranks.run(2, check_operator)


def attend_reordered(group):
    """Make two independent calls, which the graphs of ranks have in another order.

    Inductor orders them by peak memory, and so by the shard lengths of the rank.
    """
    torch._dynamo.reset()

    def attend(*calls):
        return [cqs.distributed.attention(*each, group=group) for each in calls]

    def reorder(graph, _):
        calls = graph.graph.find_nodes(
            op="call_function", target=torch.ops.cqs.sharded_attention.default
        )
        if dist.get_rank(group):
            calls[0].prepend(calls[1])
        graph.recompile()
        return graph

    calls = [[each.detach() for each in operands(rows)] for rows in (9, 4)]
    torch.compile(attend, backend=reorder, fullgraph=True)(*calls)


def test_calls_that_the_compiler_has_reordered_on_one_rank(ranks):
    """They have equal arguments, so each would be paired with the other one."""
    for error, text in ranks.run(2, raised, attend_reordered):
        assert error is ValueError
        assert text == "rank 1 of the group has place in its compiled graph 2, rank 0 has 1"


def compare_meshes(group):
    """Return differences of calls on a mesh, and on DTensors, from a call on plain shards."""
    torch.manual_seed(0)
    mesh, rank = DeviceMesh.from_group(group, "cpu"), dist.get_rank(group)
    wholes = [torch.randn(*shape, 19, 8, dtype=torch.float64) for shape in SHAPES]
    shards = [each.tensor_split([10], 2)[rank].detach().requires_grad_() for each in wholes]
    sharded = [distribute_tensor(each, mesh, [Shard(2)]).requires_grad_() for each in wholes]
    options = {"is_causal": True, "return_lse": True}
    expected = results(partial(layer, group=group, **options), shards)
    on_dtensors = partial(layer, **options)
    calls = {
        "mesh": (partial(layer, group=mesh, **options), shards),
        "DTensors": (on_dtensors, sharded),
        "DTensors and mesh": (partial(layer, group=mesh, **options), sharded),
        "compiled": (compile_whole(on_dtensors), sharded),
    }
    largest = {}
    for name, (attend, tensors) in calls.items():
        found = results(attend, tensors)
        if tensors is sharded:
            assert all(isinstance(each, DTensor) for each in found)
            assert [each.shape[2] for each in found] == [19] * 5
            assert all(each.placements == (Shard(2),) for each in found)
            found = [each.to_local() for each in found]
        largest[name] = max(differences(found, expected))
    return largest


def test_meshes_and_dtensors(ranks):
    """Uneven shards: 10 and 9 rows."""
    for differences in ranks.run(2, compare_meshes):
        assert set(differences.values()) == {0.0}


def attend_by_heads(group):
    """Attend with DTensors that are sharded on the heads."""
    mesh = DeviceMesh.from_group(group, "cpu")
    tensors = [distribute_tensor(torch.randn(*shape, 8, 8), mesh, [Shard(1)]) for shape in SHAPES]
    cqs.distributed.attention(*tensors)


def test_dtensors_that_are_not_sharded_on_the_sequence(ranks):
    for error, text in ranks.run(2, raised, attend_by_heads):
        assert error is ValueError and text.startswith("query must have") and "dim=1" in text
