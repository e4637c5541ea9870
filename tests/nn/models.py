"""What ranks run: models on a mesh, beside the same ones on one device."""

from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import raised
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cqs.nn import HybridDecoder, HybridTransformerBlock, reduce_gradients
from cqs.patterns import documents

SMALL = {"hidden_size": 24, "num_heads": 12, "num_kv_heads": 4, "feed_forward_size": 36}
VOCABULARY = 11
SHAPES = (1, 2), (2, 1), (1, 4), (2, 2), (3, 2), (4, 1), (1, 5)
AXES = "sequence", "tensor"


@cache
def make_mesh(*shape, names=AXES, backwards=False):
    """A mesh of the first ranks; all ranks of the world must make it, and then have it."""
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    return DeviceMesh("cpu", ranks.flip(1) if backwards else ranks, mesh_dim_names=names)


def make_meshes(group):
    for shape in SHAPES:
        make_mesh(*shape)
    make_mesh(1, 2, names=AXES[::-1])
    make_mesh(1, 2, backwards=True)


def make_block(mesh, **options):
    return HybridTransformerBlock(**SMALL | {"dtype": torch.float64} | options, mesh=mesh)


def make_decoder(mesh, patterns=(None,), **options):
    blocks = [make_block(mesh, pattern=pattern, **options) for pattern in patterns]
    return HybridDecoder(VOCABULARY, blocks, dtype=torch.float64)


def make_compiled(mesh, patterns):
    """A decoder that is compiled, without a compiler that takes long."""
    model = make_decoder(mesh, patterns)
    model.compile(backend="aot_eager", fullgraph=mesh is None)
    return model


def cut(whole, mesh):
    """This rank's rows."""
    if mesh is None:
        return whole
    return distribute_tensor(whole, mesh, [Shard(1), Shard(1)], src_data_rank=None).to_local()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_of(model):
    return {name: whole(each.grad).clone() for name, each in model.named_parameters()}


def largest(ours, theirs):
    """Return the largest difference of the tensors of a name."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def loss_of(model, mesh, data):
    """The part of this rank's rows in the loss, and their logits."""
    inputs, targets = (cut(each, mesh) for each in data)
    output = model(inputs)
    loss = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / data[0].numel(), output


def train(model, mesh, data, steps):
    """Return output and gradients of the first step, and parameters after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss, output = loss_of(model, mesh, data)
        loss.backward()
        if isinstance(mesh, DeviceMesh):
            reduce_gradients(model, mesh)
        if step == 0:
            first, gradients = output.detach(), gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return first, gradients, {name: whole(each) for name, each in model.named_parameters()}


def draw(tokens, batch):
    """What goes in, and what is to come out."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (2, batch, tokens), generator=generator)


def largest_differences(group, make, shape, options, tokens=29, batch=2, steps=1):
    """Return the error of a model on a mesh, relative to the same on one device."""
    data = draw(tokens, batch)
    torch.manual_seed(0)
    expected = train(make(None, **options), None, data, steps)
    torch.manual_seed(dist.get_rank(group))  # all get what the first rank draws
    mesh = make_mesh(*shape)
    found = train(make(mesh, **options), mesh, data, steps)

    rows = cut(expected[0], mesh)
    output = float((found[0] - rows).abs().max()) if rows.numel() else 0.0
    return output, *(largest(*each) for each in zip(found[1:], expected[1:], strict=True))


def uneven_difference(group, rows, shape):
    """Shards of other lengths than chunks, between tensor axes: the error of outputs."""
    mesh, sizes = make_mesh(*shape), (1, sum(rows), SMALL["hidden_size"])
    inputs = torch.randn(sizes, generator=torch.manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    expected = make_block(None)(inputs)
    first = sum(rows[: dist.get_rank(group)])
    own = slice(first, first + rows[dist.get_rank(group)])
    torch.manual_seed(0)
    output = make_block(mesh)(inputs[:, own])
    return float((output - expected[:, own]).abs().sum())


def packed_differences(group, shape, patterns, all_lengths):
    """Packed sequences of one decoder: the errors of logits and gradients in every pass.

    On one device each sequence is computed alone. Rotary embeddings count on from one sequence to
    the next, which changes nothing, because they are relative.
    """
    torch.manual_seed(0)
    mesh, alone, found = make_mesh(*shape), make_decoder(None, patterns), []
    torch.manual_seed(0)
    model = make_decoder(mesh, patterns)
    for lengths in all_lengths:
        generator = torch.Generator().manual_seed(len(lengths))
        tokens = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=generator)
        expected = torch.cat([alone(each) for each in tokens.split(lengths, 1)], dim=1)
        expected.square().sum().backward()
        ends = torch.tensor([0, *lengths]).cumsum(0)
        output = model(cut(tokens, mesh), documents(ends))
        output.square().sum().backward()
        reduce_gradients(model, mesh)
        found.append(float((output - cut(expected.detach(), mesh)).detach().abs().max()))
        found.append(largest(gradients_of(model), gradients_of(alone)))
        alone.zero_grad()
        model.zero_grad()
    return found


def difference_under_fully_shard(group, shape, is_compiled):
    """PyTorch's own sharding over the sequence axis: the error of gradients.

    Every block that is compiled is one graph, and has the whole sequence.
    """
    from torch.distributed.fsdp import fully_shard

    mesh, data = make_mesh(*shape), draw(29, 2)
    of_rows = None if is_compiled else mesh
    torch.manual_seed(0)
    _, expected, _ = train(make_decoder(None, [None, None]), None, data, 1)
    torch.manual_seed(0)
    model = make_decoder(of_rows, [None, None])
    for block in model.blocks:
        if is_compiled:
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh["sequence"])
    fully_shard(model, mesh=mesh["sequence"])
    for part in (*model.blocks, model):
        part.set_gradient_divide_factor(shape[0] if is_compiled else 1.0)
    loss_of(model, of_rows, data)[0].backward()
    return largest(gradients_of(model), expected)


def moved_between_layouts(group, shapes):
    """Hand the state of one device from mesh to mesh and back; say if it is as it was."""
    from torch.distributed.checkpoint import state_dict

    whole = state_dict.StateDictOptions(full_state_dict=True)
    torch.manual_seed(0)
    state = first = make_decoder(None).state_dict()
    for shape in shapes:
        torch.manual_seed(7)
        model = make_decoder(make_mesh(*shape))
        state_dict.set_model_state_dict(model, dict(state), options=whole)
        state = state_dict.get_model_state_dict(model, options=whole)
    assert state.keys() == first.keys()
    return all(torch.equal(each, first[name]) for name, each in state.items())


def make_on_mesh(group, shape, options, how):
    make_block(make_mesh(*shape, **how), **options)


def call_block(group, shape, shards, is_dtensor=False):
    """Call a block with such shards, of which the last may be a DTensor."""
    mesh, shard = make_mesh(*shape), shards[dist.get_rank(group)]
    if is_dtensor and dist.get_rank(group) == dist.get_world_size(group) - 1:
        shard = DTensor.from_local(shard, mesh["tensor"], [Shard(1)])
    make_block(mesh)(shard)


def gradients_of_experts(group):
    """Ranks use one expert each of three, one of which nobody uses, and a layer of their own."""
    experts = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    rank = dist.get_rank(group)
    experts[rank](torch.full((1, 2), 10.0**rank)).sum().backward()
    reduce_gradients(experts, make_mesh(2, 1))
    found = [None if each.weight.grad is None else each.weight.grad.tolist() for each in experts]
    return found, raised(experts[: 2 + rank], reduce_gradients, make_mesh(2, 1))
