"""Networks written by hand as in well-known small projects: GPT, diffusion, graphs, experts, pairs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import varuna
from tests.zoo.hand_made import mean_square, vectors
from tests.zoo.trial import Call, Case

WORDS, LENGTH, WIDTH = 24, 8, 12


def ids(n: int, g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, WORDS, (n, *(shape or (LENGTH,))), generator=g)


class Attention(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.qkv(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        mixed = F.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.feed = feed or nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class SmallGPT(nn.Module):
    """Tied head, positions by arange, optional targets, logits and loss, as in nanoGPT."""

    def __init__(self, feed: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Block(feed() if feed else None) for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _b, t = idx.size()
        assert t <= LENGTH, f"Cannot forward sequence of length {t}"
        positions = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Experts(nn.Module):
    """Two of four experts for each token, all of which run on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).topk(2, dim=-1)
        weights = torch.zeros_like(x[..., :4]).scatter(-1, chosen, best.softmax(-1))
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * weights.unsqueeze(-2)).sum(-1)


class SparseExperts(Experts):
    """Each expert runs on the tokens that chose it: a loop with sizes that depend on data."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        best, chosen = self.router(flat).topk(2, dim=-1)
        weights = best.softmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


class TimeBlock(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm, self.again = nn.GroupNorm(2, inside), nn.GroupNorm(2, outside)
        self.conv, self.last = nn.Conv2d(inside, outside, 3, 1, 1), nn.Conv2d(outside, outside, 3, 1, 1)
        self.time = nn.Linear(16, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv(F.silu(self.norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.last(F.dropout(F.silu(self.again(h)), 0.1, self.training)) + self.skip(x)


class Denoiser(nn.Module):
    """A UNet of diffusion: sinusoidal times, attention in the middle, skips by a stack, noise as target."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.inside = nn.Conv2d(3, 8, 3, 1, 1)
        self.down = nn.ModuleList([TimeBlock(8, 8), TimeBlock(8, 16)])
        self.shrink = nn.ModuleList([nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)])
        self.middle, self.attend = TimeBlock(16, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ModuleList([TimeBlock(32, 8), TimeBlock(16, 8)])
        self.outside = nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> dict[str, Tensor]:
        level = torch.cos(t.to(x.dtype) / 1000 * math.pi / 2).view(-1, 1, 1, 1)
        h = level * x + (1 - level**2).sqrt() * noise
        angles = t[:, None] * torch.exp(-math.log(10000.0) * torch.arange(4, device=t.device) / 4)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        h, skips = self.inside(h), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            h = block(h, time)
            skips.append(h)
            h = shrink(h)
        h = self.middle(h, time)
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attend(tokens, tokens, tokens)[0].transpose(1, 2).view_as(h)
        for block in self.up:
            h = block(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1), time)
        return {"loss": F.mse_loss(self.outside(h), noise)}


class Messages(nn.Module):
    """A graph for each sample: messages along its edges, summed at their ends by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.update, self.last = nn.Linear(6, 8), nn.GRUCell(8, 8), nn.Linear(8, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.first(nodes))
        b, n, c = h.shape
        for _ in range(2):
            sent = h.gather(1, edges[..., :1].expand(-1, -1, c))
            arrived = torch.zeros_like(h).scatter_add(1, edges[..., 1:].expand(-1, -1, c), sent)
            h = self.update(arrived.reshape(-1, c), h.reshape(-1, c)).view(b, n, c)
        return self.last(h.amax(1)).squeeze(-1).square().mean()


class OffsetMessages(Messages):
    """All graphs of a batch as one: node numbers with an offset for each sample, index_add over all nodes."""

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.first(nodes))
        b, n, c = h.shape
        offset = torch.arange(b, device=nodes.device).view(-1, 1, 1) * n
        source, target = (edges + offset).flatten(0, 1).unbind(-1)
        flat = h.reshape(-1, c)
        for _ in range(2):
            flat = self.update(torch.zeros_like(flat).index_add(0, target, flat[source]), flat)
        return self.last(flat.view(b, n, c).mean(1)).square().mean()


class Adversaries(nn.Module):
    """Generator and critic in one module: both losses at once, the generator's through a frozen critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(6, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1)
        )

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise)
        critic = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean()
        frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
        return critic + F.softplus(-torch.func.functional_call(self.critic, frozen, (made,))).mean()


class Contrast(nn.Module):
    """One encoder for three inputs, with a margin between near and far."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        a, p, n = (F.normalize(self.encoder(x), dim=-1) for x in (anchor, near, far))
        return F.triplet_margin_loss(a, p, n, margin=0.5)


class Packed(nn.Module):
    """Sequences of different lengths, packed and unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (hidden, _) = self.lstm(packed)
        whole, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return whole, hidden[-1]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.packed, self.head = (
            nn.Embedding(WORDS, WIDTH, padding_idx=0),
            Packed(),
            nn.Linear(24, 5),
        )

    def forward(self, words: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:
        whole, last = self.packed(self.embed(words), lengths)
        scores = self.head(torch.cat([whole, last.unsqueeze(1).expand(-1, whole.shape[1], -1)], -1))
        return F.cross_entropy(scores.flatten(0, 1), tags.flatten())


class Autoencoder(nn.Module):
    """A variational autoencoder: reparametrization, and two losses that sum over elements."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        missed = F.mse_loss(self.decode(z), x, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return (missed + divergence) / x.size(0)


class MixerLayer(nn.Module):
    """Channels last, layer scale, stochastic depth by sample: as in timm's ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.gamma = nn.LayerNorm(width), nn.Parameter(0.1 * torch.ones(width))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = (self.gamma * self.feed(self.norm(h))).permute(0, 3, 1, 2)
        if self.training:
            keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.8)
            h = h * keep.div_(0.8)
        return x + h


def pairs(n: int, g: torch.Generator) -> Call:
    return (), {"idx": ids(n, g), "targets": ids(n, g).where(torch.rand(n, LENGTH, generator=g) < 0.7, -1)}


def graphs(n: int, g: torch.Generator) -> Call:
    return (), {"nodes": vectors(n, g, 5, 6), "edges": torch.randint(0, 5, (n, 9, 2), generator=g)}


def noisy(n: int, g: torch.Generator) -> Call:
    times = torch.randint(0, 1000, (n,), generator=g)
    return (), {"x": vectors(n, g, 3, 16, 16), "noise": vectors(n, g, 3, 16, 16), "t": times}


def tagged(n: int, g: torch.Generator) -> Call:
    lengths = torch.randint(1, LENGTH + 1, (n,), generator=g)
    tags = torch.randint(0, 5, (n, LENGTH), generator=g)
    return (), {
        "words": ids(n, g),
        "lengths": lengths,
        "tags": tags.where(torch.arange(LENGTH) < lengths[:, None], -100),
    }


def three(n: int, g: torch.Generator) -> Call:
    return (), {name: vectors(n, g, 6) for name in ("anchor", "near", "far")}


def itself(out: Any) -> Tensor:
    loss: Tensor = out["loss"] if isinstance(out, dict) else out[1] if isinstance(out, tuple) else out
    return loss


CASES: dict[str, Case] = {
    "nanoGPT": Case(SmallGPT, pairs, itself),
    "nanoGPT, dense experts": Case(lambda: SmallGPT(Experts), pairs, itself),
    "nanoGPT, sparse experts": Case(lambda: SmallGPT(SparseExperts), pairs, itself),
    "diffusion": Case(Denoiser, noisy, itself),
    "graphs": Case(Messages, graphs, itself),
    "graphs, offsets": Case(OffsetMessages, graphs, itself),
    "adversaries": Case(
        Adversaries,
        lambda n, g: ((), {"real": vectors(n, g, 6), "noise": vectors(n, g, 4)}),
        itself,
        by_microbatch=True,  # spectral_norm iterates in each micro-batch
    ),
    "triplets": Case(Contrast, three, itself, by_microbatch=True),
    "packed tagger": Case(Tagger, tagged, itself),
    "packed tagger, opaque": Case(lambda: varuna.opaque(Tagger(), "packed"), tagged, itself),
    "variational autoencoder": Case(Autoencoder, lambda n, g: ((vectors(n, g, 6),), {}), itself),
    "stochastic depth": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 4), MixerLayer(8), MixerLayer(8)),
        lambda n, g: ((vectors(n, g, 3, 16, 16),), {}),
        mean_square,
    ),
}
