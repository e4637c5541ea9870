"""A denoising step of a transformer of diffusers, on one device and on ranks that share its tokens.

Every method has a model of its own, because a model keeps its context parallelism.
"""

import math
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers.utils import logging
from torch import Tensor, nn

from benchmarks.bottleneck import SHAPES
from cqs.integrations.diffusers import register

_BACKENDS = {"sdpa": "native", "cqs one": "cqs", "cqs": "cqs"}
"""Name of a method -> its attention backend in diffusers."""
_PEER_BACKEND = "_native_cudnn"
"""Backend of diffusers' own methods: the fastest of PyTorch on Hopper GPUs that returns the LSE,
which a ring requires."""
_GAIN = 1.5
"""Standard deviation of what a matrix makes of inputs of 1, so that all parts of a layer matter."""
_SHARPNESS = 4.0
"""Weight of the norm of queries: few keys matter to a query, so that a missing key is an error."""


class Denoising:
    """Models with the same random weights, one for each method, and the inputs of a step."""

    results = ("output",)
    """Names of the tensors that a step returns."""

    def __init__(self, shape: str, length: int, device: torch.device) -> None:
        """Make models and inputs: a text, and as many frames as tokens, of one patch each."""
        logging.set_verbosity_error()  # every model warns that parallelism is experimental
        register()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config = SHAPES["diffusers"][shape]
        if config["_class_name"] == "WanTransformer3DModel":
            sizes, latents, text = {"rope_max_seq_len": length}, (16, length, 2, 2), 512
        else:
            sizes = {"sample_frames": 4 * length - 3, "sample_height": 2, "sample_width": 2}
            latents, text = (length, 16, 2, 2), 226
        degrees = _make_degrees(config, length, device)
        self.methods = [*degrees]
        """Names of the methods of all ranks."""
        self._models = {}
        for name in ("sdpa", "cqs one", *degrees):
            with device:
                model = self._models[name] = _make_model(config | sizes, self.dtype)
            model.set_attention_backend(_BACKENDS.get(name, _PEER_BACKEND))
            if name in degrees:
                parallel = diffusers.ContextParallelConfig(**degrees[name])
                model.enable_parallelism(config=parallel)
        with device:
            self._inputs = {
                "hidden_states": torch.randn(1, *latents, dtype=self.dtype),
                "encoder_hidden_states": torch.randn(1, text, 4096, dtype=self.dtype),
                "timestep": torch.tensor([500]),
            }

    @torch.no_grad()
    def step(self, name: str) -> list[Tensor]:
        """Return the output of a step by a method, in the shape of the latents, on every rank."""
        output: Tensor = self._models[name](**self._inputs, return_dict=False)[0]
        return [output]


def _make_degrees(
    config: dict[str, Any], length: int, device: torch.device
) -> dict[str, dict[str, int]]:
    """Return the options of ``ContextParallelConfig`` for the methods that run here, by name.

    diffusers' own methods require GPUs and a plan of the model; ``ulysses anything`` pads the heads
    and requires one for the last rank.
    """
    number, model_class = dist.get_world_size(), getattr(diffusers, config["_class_name"])
    if number == 1:
        return {}
    degrees: dict[str, dict[str, int]] = {"cqs": {"ring_degree": number}}
    if device.type == "cpu" or model_class._cp_plan is None:
        return degrees
    heads, is_divided = config["num_attention_heads"], length % number == 0
    supported = {
        "ulysses": is_divided and heads % number == 0,
        "ring": is_divided,
        "ulysses anything": heads > (number - 1) * math.ceil(heads / number),
        "ring anything": True,
    }
    for name in filter(supported.__getitem__, supported):
        kind, *modes = name.split()
        degrees[name] = {f"{kind}_degree": number, **{f"{kind}_{mode}": True for mode in modes}}
    return degrees


def _make_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return a model with random weights of the dtypes that ``from_pretrained`` would give them."""
    options = dict(config)
    torch.manual_seed(0)
    model = getattr(diffusers, options.pop("_class_name"))(**options)
    kept = {*(model._keep_in_fp32_modules or ())}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=_GAIN * parameter[0].numel() ** -0.5)
        elif name.endswith("norm_q.weight"):
            nn.init.constant_(parameter, _SHARPNESS)
        if not kept & {*name.split(".")}:
            parameter.data = parameter.to(dtype)
    return model
