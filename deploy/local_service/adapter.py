"""One LoRA adapter: its shape, its parameters in one flat buffer, its digest."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from deploy.local_service.base_model import ModelShape
from evidence.canonical import canonical_bytes
from evidence.errors import InputError

MAX_RANK = 256
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Field of `LayerWeights` to the modules whose rows it holds, in order."""
UNEMBED = "unembed"


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Shape and initialization of an adapter.

    The weight of an adapted module is ``W + alpha / rank * B @ A`` with A [rank, in] and B
    [out, rank].
    """

    rank: int
    seed: int | None = None
    """Seed of A; None draws one."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise InputError("rank", self.rank, f"1 to {MAX_RANK}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise InputError("lora_config", "no module", "at least one of attn, mlp and unembed")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise InputError("alpha", self.alpha, "a positive finite number")

    @property
    def scale(self) -> float:
        """Factor of ``B @ A``."""
        return self.alpha / self.rank


class Adapter:
    """Float32 parameters of one adapter and room for their gradients.

    All parameters lie in ``flat``, a contiguous vector; ``parameters`` are views of it under names
    such as ``layers.0.q_proj.A``. ``gradient`` has the same layout.
    """

    def __init__(self, shape: ModelShape, config: LoraConfig) -> None:
        """Make an adapter that changes nothing yet: A uniform in +-1/sqrt(in), B zero."""
        seed = secrets.randbits(31) if config.seed is None else config.seed
        self.config = LoraConfig(**{**asdict(config), "seed": seed})
        self.shape = shape
        sizes = dict(_parameter_shapes(shape, self.config))
        self.flat = torch.zeros(sum(rows * columns for rows, columns in sizes.values()))
        self.gradient = torch.zeros_like(self.flat)
        self.has_gradient = False
        self._sizes = sizes
        self.parameters = _views(self.flat, sizes)
        generator = torch.Generator().manual_seed(seed)
        for name, value in self.parameters.items():
            if name.endswith(".A"):
                bound = 1.0 / math.sqrt(value.shape[1])
                value.uniform_(-bound, bound, generator=generator)

    @property
    def unembed_modules(self) -> tuple[str, ...]:
        """The unembedding's module name, or none if it is not adapted."""
        return (UNEMBED,) if f"{UNEMBED}.A" in self.parameters else ()

    def modules(self, layer: int, field: str) -> tuple[str, ...]:
        """Return the names of the adapted modules in a field of `LayerWeights`, or none."""
        names = tuple(f"layers.{layer}.{part}" for part in FUSED[field])
        return names if f"{names[0]}.A" in self.parameters else ()

    def merge(self, weight_OI: Tensor, modules: tuple[str, ...]) -> Tensor:
        """Return a matrix with ``alpha / rank * B @ A`` of each module added to its rows.

        Args:
            weight_OI: float32, the modules' rows one below the other; left as it is.
            modules: adapted modules, in order.
        """
        merged = torch.empty_like(weight_OI)
        start = 0
        for name in modules:
            a, b = self.parameters[f"{name}.A"], self.parameters[f"{name}.B"]
            rows = slice(start, start + len(b))
            torch.addmm(weight_OI[rows], b, a, alpha=self.config.scale, out=merged[rows])
            start += len(b)
        return merged

    def empty_gradient(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a zero vector laid out like the parameters, and its named views."""
        flat = torch.zeros_like(self.flat)
        return flat, _views(flat, self._sizes)

    def clear_gradient(self) -> None:
        """Forget the gradient."""
        self.gradient.zero_()
        self.has_gradient = False

    def sha256(self) -> str:
        """Return the digest of rank, alpha, parameter names, shapes and values."""
        layout = {name: list(value.shape) for name, value in self.parameters.items()}
        head = {"rank": self.config.rank, "alpha": self.config.alpha, "parameters": layout}
        found = hashlib.sha256(canonical_bytes(head))
        found.update(self.flat.numpy().tobytes())
        return found.hexdigest()


def _views(flat: Tensor, sizes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """Return the named matrices that lie one after the other in a vector."""
    pieces = torch.split(flat, [rows * columns for rows, columns in sizes.values()])
    return {
        name: piece.view(size) for (name, size), piece in zip(sizes.items(), pieces, strict=True)
    }


def _parameter_shapes(
    shape: ModelShape, config: LoraConfig
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield every parameter's name and [rows, columns], in the order of the flat buffer."""
    modules = (_ATTENTION if config.train_attn else ()) + (_MLP if config.train_mlp else ())
    sizes = {
        "q_proj": (shape.query_dim, shape.hidden),
        "k_proj": (shape.kv_dim, shape.hidden),
        "v_proj": (shape.kv_dim, shape.hidden),
        "o_proj": (shape.hidden, shape.query_dim),
        "gate_proj": (shape.mlp, shape.hidden),
        "up_proj": (shape.mlp, shape.hidden),
        "down_proj": (shape.hidden, shape.mlp),
    }
    named = [
        (f"layers.{layer}.{module}", sizes[module])
        for layer in range(shape.layers)
        for module in modules
    ]
    if config.train_unembed:
        named.append((UNEMBED, (shape.vocab, shape.hidden)))
    for name, (out_size, in_size) in named:
        yield f"{name}.A", (config.rank, in_size)
        yield f"{name}.B", (out_size, config.rank)
