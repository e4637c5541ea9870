"""Denoise a video on several ranks, and compare the result with that of one process.

The model has the architecture of CogVideoX with random weights, 30 heads and by default 115
tokens, so three ranks have shards of different lengths. Every rank passes the whole latents, and
the model shards them.

    torchrun --nproc-per-node 3 examples/video_diffusion.py
    torchrun --nproc-per-node 3 examples/video_diffusion.py --height 45 --width 77 --head-dim 64
"""

import argparse
import os

import torch
import torch.distributed as dist
from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel, ContextParallelConfig
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor

from cqs.integrations.diffusers import register

NUM_HEADS = 30
NUM_TEXT_TOKENS = 10


def make_model(args: argparse.Namespace, device: torch.device) -> CogVideoXTransformer3DModel:
    """Return a model with the same random weights on every rank."""
    torch.manual_seed(0)
    return CogVideoXTransformer3DModel(
        num_attention_heads=NUM_HEADS,
        attention_head_dim=args.head_dim,
        num_layers=args.layers,
        text_embed_dim=32,
        use_rotary_positional_embeddings=True,
    ).to(device)


@torch.no_grad()
def denoise(model: CogVideoXTransformer3DModel, args: argparse.Namespace) -> Tensor:
    """Return the latents of a video, ``[1, frames, channels, 2 * height, 2 * width]``."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, args.frames, model.config.in_channels, 2 * args.height, 2 * args.width
    latents = torch.randn(shape, generator=generator).to(model.device)
    text = torch.randn(1, NUM_TEXT_TOKENS, 32, generator=generator).to(model.device)
    grid = args.height, args.width
    positions = get_3d_rotary_pos_embed(
        args.head_dim, ((0, 0), grid), grid, args.frames, device=model.device
    )
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction")
    scheduler.set_timesteps(args.steps, device=model.device)
    for step in scheduler.timesteps:
        predicted = model(latents, text, step[None], image_rotary_emb=positions).sample
        latents = scheduler.step(predicted, step, latents, return_dict=False)[0]
    return latents


def main() -> None:
    """Denoise on all ranks; rank 0 also denoises alone, and prints the deviation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--frames", type=int, default=3, help="latent frames")
    parser.add_argument("--height", type=int, default=5, help="rows of tokens in a frame")
    parser.add_argument("--width", type=int, default=7, help="columns of tokens in a frame")
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="denoising steps")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    register()
    model = make_model(args, device)
    model.set_attention_backend("cqs")
    if num_ranks > 1:
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=num_ranks))
    latents = denoise(model, args)

    if rank == 0:
        alone = make_model(args, device)
        alone.set_attention_backend("native")
        expected = denoise(alone, args)
        deviation = (latents - expected).abs().max() / expected.abs().max()
        num_tokens = args.frames * args.height * args.width + NUM_TEXT_TOKENS
        print(f"{num_ranks} ranks, {NUM_HEADS} heads, {num_tokens} tokens, {args.steps} steps")
        print(f"largest deviation from one process: {deviation:.1e} of the largest value")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
