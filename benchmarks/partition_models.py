"""Models of all sorts for the benchmark of cuts, with the blocks after which one would cut them by hand."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 1024
TEXT = ("input_ids", "labels")


class Subject(NamedTuple):
    """A model, and the names of the blocks after which one would put CutPoints."""

    name: str
    make: Callable[[], nn.Module]
    blocks: tuple[str, ...]
    get_batch: Callable[[int], dict[str, Tensor]]

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self.make().train()


def text(size: int) -> dict[str, Tensor]:
    return {name: torch.zeros(size, TOKENS, dtype=torch.long) for name in TEXT}


def images(size: int) -> dict[str, Tensor]:
    return {"images": torch.zeros(size, 3, 224, 224), "labels": torch.zeros(size, dtype=torch.long)}


def numbered(pattern: str, count: int) -> tuple[str, ...]:
    """All but the last: after it comes nothing that another stage could do."""
    return tuple(pattern.format(index) for index in range(count - 1))


def _hugging_face(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return made

    return make


def gpt2(layers: int) -> Subject:
    make = _hugging_face("GPT2LMHeadModel", "GPT2Config", n_layer=layers, n_head=16, n_embd=1024)
    return Subject(f"gpt2-{layers}", make, numbered("transformer.h.{}", layers), text)


def llama(layers: int) -> Subject:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816}
    make = _hugging_face("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=layers, **sizes)
    return Subject(f"llama-{layers}", make, numbered("model.layers.{}", layers), text)


def bert(layers: int) -> Subject:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    make = _hugging_face(
        "BertForMaskedLM", "BertConfig", num_hidden_layers=layers, max_position_embeddings=TOKENS, **sizes
    )
    return Subject(f"bert-{layers}", make, numbered("bert.encoder.layer.{}", layers), text)


def bart(layers: int) -> Subject:
    make = _hugging_face(
        "BartForConditionalGeneration", "BartConfig", encoder_layers=layers, decoder_layers=layers
    )
    blocks = (*numbered("model.encoder.layers.{}", layers + 1), *numbered("model.decoder.layers.{}", layers))
    return Subject(f"bart-{layers}", make, blocks, text)


class Residual(nn.Module):
    """Three convolutions and a sum."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        made = 4 * width
        self.straight = nn.Sequential(
            nn.Conv2d(given, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, made, 1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.past: nn.Module = nn.Identity()
        if given != made or stride > 1:
            self.past = nn.Sequential(nn.Conv2d(given, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.straight(x) + self.past(x))


class ResNet(nn.Module):
    def __init__(self, counts: tuple[int, ...] = (3, 4, 23, 3), width: int = 128) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.ModuleList()
        given = 64
        for level, count in enumerate(counts):
            for index in range(count):
                own = width << level
                self.blocks.append(Residual(given, own, 2 if level and not index else 1))
                given = 4 * own
        self.head = nn.Linear(given, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Inception(nn.Module):
    """Four branches, put side by side again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        part = width // 4
        self.branches = nn.ModuleList(
            nn.Sequential(*(nn.Conv2d(width if not i else part, part, 3, 1, 1) for i in range(length)))
            for length in (1, 2, 3, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([torch.relu(branch(x)) for branch in self.branches], 1)


class Inceptions(nn.Module):
    def __init__(self, blocks: int = 16, width: int = 512) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.ModuleList(Inception(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class UNet(nn.Module):
    """Down, with what is given kept for the way up."""

    def __init__(self, width: int = 128, levels: int = 4, each: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.smaller, self.larger = nn.ModuleList(), nn.ModuleList()
        for level in range(levels):
            own = width << level
            self.down.append(nn.Sequential(*(self._step(own, own) for _ in range(each))))
            self.smaller.append(nn.Conv2d(own, 2 * own, 2, 2))
            self.larger.append(nn.ConvTranspose2d(2 * own, own, 2, 2))
            self.up.append(
                nn.Sequential(self._step(2 * own, own), *(self._step(own, own) for _ in range(each)))
            )
        self.middle = nn.Sequential(*(self._step(width << levels, width << levels) for _ in range(each)))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _step(given: int, made: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, 3, 1, 1), nn.GroupNorm(8, made), nn.ReLU())

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        kept = []
        for down, smaller in zip(self.down, self.smaller, strict=True):
            x = down(x)
            kept.append(x)
            x = smaller(x)
        x = self.middle(x)
        for up, larger in reversed(list(zip(self.up, self.larger, strict=True))):
            x = up(torch.cat([larger(x), kept.pop()], 1))
        return ((self.head(x) - images) ** 2).mean() + 0.0 * labels.float().mean()


class Layer(nn.Module):
    """Sizes of a transformer."""

    def __init__(self, width: int, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class TwoTowers(nn.Module):
    """Two transformers that take turns, layer by layer, and meet at the end."""

    def __init__(self, layers: int = 12, width: int = 1024) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(32_000, width) for _ in TEXT)
        self.towers = nn.ModuleList(nn.ModuleList(Layer(width) for _ in range(layers)) for _ in TEXT)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.embed[0](input_ids), self.embed[1](labels)
        for one, other in zip(*self.towers, strict=True):
            x, y = one(x), other(y)
        return ((x.mean(1) - y.mean(1)) ** 2).mean()


class ProjectedFirst(nn.Module):
    """A decoder for whose layers all keys and values are made at once, from what an encoder gave."""

    def __init__(self, layers: int = 12, width: int = 1024) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(32_000, width) for _ in TEXT)
        self.encoder = nn.ModuleList(Layer(width) for _ in range(layers))
        self.memory = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 32_000)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.embed[0](input_ids), self.embed[1](labels)
        for layer in self.encoder:
            x = layer(x)
        memories = [project(x).chunk(2, -1) for project in self.memory]
        for layer, (keys, values) in zip(self.decoder, memories, strict=True):
            y = layer(y + F.scaled_dot_product_attention(y, keys, values))
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def two_towers(layers: int) -> Subject:
    make = partial(TwoTowers, layers)
    return Subject(
        f"two towers-{layers}", make, numbered("towers.1.{}", layers + 1)[:-1] or ("embed.1",), text
    )


MODELS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        gpt2(24),
        llama(22),
        bert(24),
        bart(12),
        Subject("resnet", ResNet, numbered("blocks.{}", 33), images),
        Subject("inception", Inceptions, numbered("blocks.{}", 16), images),
        Subject(
            "u-net",
            UNet,
            (
                *(f"{way}.{i}" for way in ("down", "smaller", "larger") for i in range(4)),
                "up.1",
                "up.2",
                "up.3",
            ),
            images,
        ),
        two_towers(12),
        Subject(
            "projected first",
            ProjectedFirst,
            (*numbered("encoder.{}", 13), *numbered("decoder.{}", 12)),
            text,
        ),
    )
}
