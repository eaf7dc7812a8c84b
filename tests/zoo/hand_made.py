"""Networks written by hand: of every kind that people write, with the habits that they have."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varuna
from tests.zoo.trial import Call, Case

WIDTH = 6


def vectors(n: int, g: torch.Generator, *more: int) -> Tensor:
    return torch.randn(n, *(more or (WIDTH,)), generator=g, dtype=torch.float64).to(torch.get_default_dtype())


def vector(n: int, g: torch.Generator) -> Call:
    return (vectors(n, g),), {}


def image(n: int, g: torch.Generator) -> Call:
    return (vectors(n, g, 3, 16, 16),), {}


def sequence(n: int, g: torch.Generator) -> Call:
    return (vectors(n, g, 9, WIDTH),), {}


def mean_square(out: Any) -> Tensor:
    """Return the mean over the samples of all floating-point outputs."""
    tensors = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not tensors:
        return torch.zeros(())
    return torch.stack(
        [t.square().flatten(1).sum(1).mean() if t.dim() and len(t) else t.sum() for t in tensors]
    ).sum()


# ------------------------------------------------------------------ convolutions


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += self.short(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.blocks = nn.Sequential(Residual(4, 4, 1), Residual(4, 8, 2), Residual(8, 8, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 4 * i), nn.ReLU(), nn.Conv2d(3 + 4 * i, 4, 3, 1, 1))
            for i in range(4)
        )
        self.head = nn.Linear(19, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 4, 1))
        self.side = nn.Linear(16, 5)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)
        return self.head(F.relu(mixed).amax((2, 3))), self.side(mixed.mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.norm = nn.GroupNorm(2, 8)
        self.grow = nn.ConvTranspose2d(4, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down[0](x))
        two = F.relu(self.down[1](F.max_pool2d(one, 2)))
        low = F.silu(self.norm(self.bottom(F.max_pool2d(two, 2))))
        y = F.interpolate(low, scale_factor=2, mode="nearest")
        y = F.relu(self.up[0](torch.cat([y, two], 1)))
        return self.up[1](torch.cat([self.grow(y), one], 1))


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)]
        for _ in range(2):
            layers += [
                nn.Conv2d(8, 8, 3, 1, 1, groups=8),
                nn.BatchNorm2d(8),
                nn.Hardswish(inplace=True),
                nn.Conv2d(8, 8, 1),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean([2, 3]))


class PatchMixer(nn.Module):
    """einsum, unfold, permuted views over every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.scale = nn.Parameter(torch.ones(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        patches = x.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 1, 3, 5).reshape(b, 16, -1)
        mixed = torch.einsum("bpc,pq->bqc", patches, self.mix).transpose(1, 2)
        return (mixed * self.scale).unfold(1, 8, 8).flatten(1).tanh()


# ------------------------------------------------------------------ sequences


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = kind(WIDTH, 8, num_layers=2, batch_first=True, bidirectional=True)  # type: ignore[arg-type]
        self.second = kind(16, 8, batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.first(x)
        x, _ = self.second(torch.tanh(x))
        return self.head(x[:, -1])


class Cells(nn.Module):
    """A loop over time, written out, with a state that starts at zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], 8), x.new_zeros(len(x), 8)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outs.append(h)
        return self.head(torch.stack(outs, 1)).mean(1)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 0
        x = self.body(
            self.words(source),
            self.words(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(x)


class TimeFirst(nn.Module):
    """The batch is the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(WIDTH, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0]).mean(0)


# ------------------------------------------------------------------ styles of code


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, left: Tensor, right: Tensor, margin: float = 0.5) -> Tensor:
        distance = F.pairwise_distance(self.tower(left), self.tower(right))
        return F.relu(distance - margin)


@dataclass
class Scores:
    logits: Tensor
    loss: Tensor | None = None
    words: str = ""


pytree.register_dataclass(Scores)


class Pair(NamedTuple):
    a: Tensor
    b: tuple[Tensor, ...]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, batch: dict[str, Any], scale: float = 1.0, flag: bool = False) -> Any:
        hidden = torch.tanh(self.first(batch["x"]))
        if flag:
            hidden = hidden * 2
        logits = self.second(hidden).masked_fill(batch["mask"], 0.0) * scale
        return {
            "scores": Scores(logits, F.mse_loss(logits, batch["y"][0]), "words"),
            "pair": Pair(hidden, (logits.argmax(1), logits > 0)),
            "n": 3,
        }


class Digits(nn.Module):
    """Two convolutions with pools and three layers, the flat size counted by a loop over the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)
        self.layers = nn.ModuleList([nn.Linear(24, 12), nn.Linear(12, 8), nn.Linear(8, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        features = 1
        for size in x.size()[1:]:
            features *= size
        x = x.view(-1, features)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Factors(nn.Module):
    """Layers without bias, then constants: a number, and a tensor that is neither buffer nor parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.two = torch.tensor([2])

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(self.up(self.down(x)) * 3, self.two)


class Forks(nn.Module):
    """One value with many readers, some of which join again before the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first, *others, last = self.layers
        trunk = first(x)
        branches = [other(trunk) for other in others]
        return trunk + last(branches[0] + branches[1] * 2) + branches[2]


class OwnNorm(nn.Module):
    """A layer norm from means and powers, in the precision of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        converts = self.weight.dtype != x.dtype
        y = x.to(self.weight.dtype) if converts else x
        centred = y - y.mean(-1, keepdim=True)
        y = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-12)
        y = self.weight * y + self.bias
        return self.after(y.to(x.dtype) if converts else y)


class BatchNormed(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(9, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


@torch.jit.script
def without_even(ids: Tensor) -> Tensor:
    ids = ids.clone()
    for row in ids:
        for place in range(row.numel()):
            if row[place] % 2 == 0:
                row[place] = 0
    return ids


class Scripted(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return without_even(ids)


class ByLoop(nn.Module):
    """A scripted loop over data before an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = Scripted()
        self.words = nn.Embedding(20, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(self.choose(ids))


class Views(nn.Module):
    """One view of a weight, used far apart; another, made long before it is used; and a weight given back."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.token = nn.Parameter(torch.zeros(1, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned, scale, token = self.matrix.t(), self.scale.to(x.dtype), self.token.expand(len(x), -1)
        x = torch.tanh(x @ turned)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x @ turned + token) * scale[None], self.layers[0].weight.t()


class Tied(nn.Module):
    """One matrix as embedding, as head and, transposed, in between; one layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for _ in range(3):
            x = x + torch.tanh(self.layer(x))
        return self.head(x + (x @ self.words.weight.t()).softmax(-1) @ self.words.weight)


class InPlace(nn.Module):
    """Changes of values, of views of them, of what was cut off and is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 1
        x[:, 0] = 0
        left, right = x.chunk(2, 1)
        y = self.second(x.clone())
        y[:, :3] += torch.tanh(left)
        y.mul_(0.5).clamp_(-2, 2)
        z = self.third(y)
        z = z.index_add(1, torch.tensor([0, 1]), right[:, :2])
        z.add_(right.sum(1, keepdim=True))
        return z.masked_fill_(z < -1, 0.0)


class Buffers(nn.Module):
    """A counter, a running mean and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.constant = torch.arange(WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.last(torch.tanh(self.layer(x) + self.table) * self.constant.to(x.dtype))


class Unused(nn.Module):
    """Parameters that no loss reaches, which plain optimizers leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.side_head = nn.Linear(WIDTH, WIDTH)
        self.seen_only = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        side = torch.tanh(self.side(x))
        with torch.no_grad():
            seen = self.seen_only(x)
        hidden = torch.tanh(self.frozen(self.body(x))) + seen + seen.detach()
        return {"out": self.head(hidden), "side": self.side_head(side)}


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x) * x.sum(1, keepdim=True), x.argmax(1)


class Numbers(nn.Module):
    """Complex and integer values, indices, sorting, several results of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spectrum = torch.fft.rfft(self.first(x))
        x = torch.fft.irfft(spectrum * torch.exp(1j * torch.tensor(0.3)), n=8).to(x.dtype)
        values, places = x.topk(4, dim=1)
        x = self.second(x.scatter(1, places, values.cumsum(1)))
        return x, places, x.sort(dim=1, descending=True).values.cummax(1).indices


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = nn.Bilinear(WIDTH, WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(x, x, x)
        x = self.norm(x + y)
        return self.mixer(x, y), weights


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for i, layer in enumerate(self.layers):
            x = x + checkpoint(layer, x, use_reentrant=i % 2 == 1)
        return x


class Normed(nn.Module):
    """Weights that are computed from parameters: weight and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8))
        self.second = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.third = nn.utils.weight_norm(nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Autocast(nn.Module):
    """A region in a precision of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.tanh(self.first(x))
        return self.second(x.float())


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.where(x > 0, x, self.second(x) * 0.1)
        return x.clamp(min=self.second.bias.mean().detach())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * grad  # not the true one: whoever loses it is found out


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Square.apply
        return self.second(apply(self.first(x)))


class Squaring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Square.apply
        return apply(x)


class OwnModule(nn.Module):
    """The same inside a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.square, self.second = nn.Linear(WIDTH, WIDTH), Squaring(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.square(self.first(x)))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 0:  # depends on the whole batch
            y = self.second(y)
        return y


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).view(7, 2, 3).flatten(1)


class Filtered(nn.Module):
    """Selects rows by data, and returns to a known size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        rows = torch.nonzero(y[:, 0] > 0).squeeze(1)
        return y.index_add(0, rows, self.second(y[rows]))


class Coupled(nn.Module):
    """Samples that look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return F.cross_entropy(y @ y.t(), torch.arange(len(x)))


class Numpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y * float(y.detach().numpy().std())


def _ids(n: int, g: torch.Generator, length: int = 9) -> Tensor:
    ids = torch.randint(1, 20, (n, length), generator=g)
    ids[:, -1] = 0
    return ids


def _nested(n: int, g: torch.Generator) -> Call:
    x, y = vectors(n, g), vectors(n, g, 4)
    return ({"x": x, "y": [y], "mask": torch.rand(n, 4, generator=g) > 0.7},), {"scale": 1.5, "flag": True}


CASES: dict[str, Case] = {
    "ResNet by hand": Case(ResNet, image, mean_square, by_microbatch=True),
    "DenseNet": Case(DenseNet, image, mean_square, by_microbatch=True),
    "Inception": Case(Inception, image, mean_square),
    "U-Net": Case(UNet, image, mean_square),
    "MobileNet": Case(MobileNet, image, mean_square, by_microbatch=True),
    "patches and einsum": Case(PatchMixer, image, mean_square),
    "LSTM": Case(lambda: Recurrent(nn.LSTM), sequence, mean_square),
    "GRU": Case(lambda: Recurrent(nn.GRU), sequence, mean_square),
    "LSTM cell in a loop": Case(Cells, sequence, mean_square),
    "GRU, batch second": Case(
        TimeFirst,
        lambda n, g: ((), {"x": vectors(9, g, n, WIDTH)}),
        mean_square,
        options={"batch_dims": {"x": 1}},
    ),
    "nn.Transformer": Case(
        Seq2Seq,
        lambda n, g: ((), {"source": _ids(n, g), "target": _ids(n, g, 8)}),
        lambda out: out.square().flatten(1).mean(1).mean(),
    ),
    "siamese": Case(
        Siamese, lambda n, g: ((vectors(n, g), vectors(n, g)), {"margin": 0.25}), lambda out: out.mean()
    ),
    "nested in and out": Case(
        Nested, _nested, lambda out: out["scores"].loss + out["pair"].a.square().sum(1).mean()
    ),
    "digits": Case(Digits, image, mean_square),
    "factors": Case(Factors, vector, mean_square),
    "forks and joins": Case(Forks, vector, mean_square),
    "layer norm by hand": Case(OwnNorm, vector, mean_square),
    "BatchNorm without statistics": Case(
        lambda: BatchNormed(track_running_stats=False), sequence, mean_square, by_microbatch=True
    ),
    "BatchNorm without weights": Case(
        lambda: BatchNormed(affine=False), sequence, mean_square, by_microbatch=True
    ),
    "BatchNorm without either": Case(
        lambda: BatchNormed(affine=False, track_running_stats=False),
        sequence,
        mean_square,
        by_microbatch=True,
    ),
    "embedding alone": Case(lambda: nn.Embedding(20, 8), lambda n, g: ((_ids(n, g),), {}), mean_square),
    "scripted loop": Case(ByLoop, lambda n, g: ((_ids(n, g),), {}), mean_square),
    "scripted loop, opaque": Case(
        lambda: varuna.opaque(ByLoop(), "choose"), lambda n, g: ((_ids(n, g),), {}), mean_square
    ),
    "views of weights": Case(Views, vector, lambda out: out[0].square().sum(1).mean()),
    "tied three times": Case(
        Tied, lambda n, g: ((_ids(n, g),), {}), lambda out: out.square().flatten(1).mean(1).mean()
    ),
    "in place": Case(InPlace, vector, mean_square),
    "buffers": Case(Buffers, vector, mean_square, by_microbatch=True),
    "unused parameters": Case(Unused, vector, lambda out: out["out"].square().sum(1).mean()),
    "identity": Case(Identity, vector, mean_square),
    "no parameters": Case(NoParameters, vector, mean_square),
    "complex and integers": Case(Numbers, vector, lambda out: out[0].square().sum(1).mean()),
    "multi-head attention": Case(Attending, sequence, mean_square),
    "checkpointed": Case(Checkpointed, vector, mean_square),
    "weight norms": Case(Normed, vector, mean_square),
    "autocast inside": Case(Autocast, vector, mean_square, dtype=torch.float32, by_microbatch=True),
    "torch.where": Case(Cond, vector, mean_square),
    "own autograd.Function": Case(OwnFunction, vector, mean_square),
    "own autograd.Function, in a module": Case(OwnModule, vector, mean_square),
    "rows by data": Case(Filtered, vector, mean_square),
    "branch on data": Case(Branch, vector, mean_square),
    "fixed batch": Case(FixedBatch, vector, mean_square),
    "coupled samples": Case(Coupled, vector, lambda out: out),
    "numpy inside": Case(Numpy, vector, mean_square),
}
