"""The models that tests train: small, each with one thing that pipelines get wrong."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint, opaque


class Plain(nn.Module):
    """Linear layers in a row; the sizes are odd on purpose."""

    def __init__(self, layers: int = 5, width: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.dropout(torch.tanh(layer(x)))
            if i < len(self.cuts):
                x = self.cuts[i](x)
        return F.mse_loss(x, y)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a key bias has no gradient but noise
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


class GPT(nn.Module):
    """A transformer with a tied embedding, a mask made before the cuts, and dropout."""

    def __init__(
        self, layers: int = 4, width: int = 12, vocab: int = 19, tokens: int = 6, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.places = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "attention": Attention(width, 2, dropout),
                    "norm2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
                }
            )
            for _ in range(layers)
        )
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.cuts = [CutPoint() for _ in range(layers)]  # a plain list, as the original's docs write it

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        s = tokens.shape[1]
        mask = torch.ones(s, s, dtype=torch.bool, device=tokens.device).tril()
        x = self.drop(self.embed(tokens) + self.places(torch.arange(s, device=tokens.device)))
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(x)
            x = x + self.drop(block["attention"](block["norm1"](x), mask))
            x = x + self.drop(block["mlp"](block["norm2"](x)))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Conv(nn.Module):
    """BatchNorm, in-place ReLU, a flatten, and a skip over two cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(6, momentum=0.3)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6 * 16, 5)
        self.cut1, self.cut2, self.cut3 = CutPoint(), CutPoint(), CutPoint()

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        skip = self.relu(self.norm1(self.first(image)))
        x = self.cut1(skip)
        x = self.relu(self.norm2(self.second(x)))
        x = self.cut2(x)
        x = F.avg_pool2d(x + skip, 2)
        x = self.cut3(x)
        return F.cross_entropy(self.head(x.flatten(1)), label)


class Odd(nn.Module):
    """[s, b, h] activations, several tensors over a cut, a non-contiguous one, values without gradient."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.mix = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.cut1, self.cut2 = CutPoint(), CutPoint()

    def forward(
        self, x: Tensor, target: Tensor, scale: float = 2.0, extra: Tensor | None = None
    ) -> dict[str, Tensor]:
        h = self.embed(x).transpose(0, 1)  # [s, b, h], not contiguous
        gate = torch.sigmoid(self.gate(h))
        best = h.argmax(-1)  # an integer that depends on weights: must be sent, without a way back
        h, gate = self.cut1(h, gate)
        h = self.mix(h * gate) * scale
        h = self.cut2(h)
        h = self.last(h + F.one_hot(best, h.shape[-1]).to(h.dtype))
        if extra is not None:
            h = h + extra
        return {"loss": F.mse_loss(h.transpose(0, 1), target), "hidden": h}


class Reused(nn.Module):
    """One layer used in every segment: tied to itself over all cuts. A frozen layer, and an unused one."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.layer = nn.Linear(width, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.frozen(x)
        for i, own in enumerate(self.own):
            x = own(torch.tanh(self.layer(x)))
            if i < 2:
                x = self.cuts[i](x)
        return F.mse_loss(x, y), x


class Paired(nn.Module):
    """Two layers, each used in two of three segments: ties of which no two stages have the same."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.early, self.late = nn.Linear(width, width), nn.Linear(width, width)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.cuts[0](torch.tanh(self.early(x)))
        x = self.cuts[1](torch.tanh(self.late(torch.tanh(self.early(x)))))
        return F.mse_loss(self.late(x), y)


class Fork(nn.Module):
    """A branch on data: which layer runs depends on the values. One that never runs gets no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.low, self.high, self.never = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mean = float(x.mean())
        return self.never(x) if mean > 1e6 else self.high(x) if mean > 0 else self.low(x)


class Branching(nn.Module):
    """Captured but for one opaque module."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.fork = opaque(Fork(width))
        self.cut1, self.cut2 = CutPoint(), CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.cut1(torch.tanh(self.first(x)))
        x = self.cut2(self.fork(x))
        return F.mse_loss(self.last(x), y)


class Counting(nn.Module):
    """Buffers of its own: a running mean that no BatchNorm keeps, and a counter."""

    mean: Tensor
    calls: Tensor

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.cut = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * x.mean())
            self.calls.add_(1)
        return F.mse_loss(self.last(self.cut(torch.tanh(self.first(x)))), y)


class Aside(nn.Module):
    """Weights that no gradient reaches, over a cut and on both sides of it; a BatchNorm used twice, another
    without a momentum; a counter that counts in evaluation too."""

    calls: Tensor

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.aside, self.tied, self.last = (nn.Linear(width, width) for _ in range(3))
        self.first = nn.Linear(width, width, bias=False)  # its bias would have no gradient but noise
        self.twice = nn.BatchNorm1d(width, affine=False)
        self.mean = opaque(nn.BatchNorm1d(width, momentum=None))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.cut = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1)
        statistics = self.twice.running_mean, self.twice.running_var
        again = F.batch_norm(2 * x, *statistics, training=self.training, momentum=0.3)
        x = self.twice(self.first(x)) + again
        x = self.mean(x) + self.tied(x).detach()
        side = self.aside(x)
        x = self.cut(x)
        return F.mse_loss(self.last(x + side.detach() + self.tied(x).detach()), y)


class Shared(nn.Module):
    """A table that all samples share, made by a layer, crosses both cuts; or else a mean over samples."""

    def __init__(self, width: int = 5, sums_up: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last, self.make = (nn.Linear(width, width) for _ in range(4))
        self.base = nn.Parameter(torch.randn(3, width))
        self.cut1, self.cut2 = CutPoint(), CutPoint()
        self.sums_up = sums_up

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        table = x.square().mean() if self.sums_up else torch.tanh(self.make(self.base))
        x = self.cut1(torch.tanh(x))
        x = self.cut2(torch.tanh(self.middle(x) + table.sum()))
        return F.mse_loss(self.last(x) * table.mean(), y)


def make_inputs(
    name: str, batch: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, object]:
    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    if name == "Plain":
        return {"x": rand(batch, 7), "y": rand(batch, 7)}
    if name == "GPT":
        return {"tokens": ints(19, batch, 6), "labels": ints(19, batch, 6)}
    if name == "Conv":
        return {"image": rand(batch, 3, 8, 8), "label": ints(5, batch)}
    if name == "Odd":
        return {"x": rand(batch, 4, 6), "target": rand(batch, 4, 6), "scale": 1.5, "extra": rand(1, 1, 6)}
    if name in ("Reused", "Paired", "Branching", "Counting", "Shared", "Aside"):
        return {"x": rand(batch, 5), "y": rand(batch, 5)}
    raise KeyError(name)


def make_model(
    name: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    cutpoints: bool = True,
    **options: object,
) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = globals()[name](**options)
    return (model if cutpoints else without_cutpoints(model)).to(dtype)


class Through(nn.Module):
    """What a CutPoint is to a plain process."""

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        return tensors[0] if len(tensors) == 1 else tensors


def without_cutpoints(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, CutPoint):
                setattr(module, name, Through())
        if isinstance(getattr(module, "cuts", None), list):
            module.cuts = [Through() for _ in module.cuts]  # type: ignore[union-attr, assignment]
    return model
