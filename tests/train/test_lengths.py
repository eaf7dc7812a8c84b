"""Lengths that differ from step to step: few captures, and the numbers of one plain process (EXA-8)."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.tasks import SEED, stage_map
from tests.train.faces import FACES, LAYOUTS, check_state
from varuna import Varuna

BATCH, VOCABULARY, WIDTH, LONGEST = 8, 31, 16, 70

Inputs = dict[str, Tensor]


class Decoder(nn.Module):
    """Uses its length in the ways that people do: tables, masks and scales."""

    scales, num_layers = True, 2
    sharpness = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True) for _ in range(self.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("table", torch.linspace(0.5, 1.5, LONGEST))

    def forward(self, ids: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        x = x * self.table[:length, None]
        if self.scales:
            x = x / math.sqrt(length) + 1 / len(ids[0])
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        scores = self.head(x).flatten(0, 1) * self.sharpness
        loss = F.cross_entropy(scores, labels.flatten(), reduction="none").view(-1, length) * keep
        kept = F.cross_entropy(scores, labels.masked_fill(keep == 0, -100).flatten())
        # Means over samples and over tokens of the whole batch: padding does not change them.
        return (loss.sum(1) / keep.sum(1)).mean() + loss.sum() / keep.sum() + kept / 3


def batch_of(step: int, length: int) -> Inputs:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (BATCH, length), generator=generator)
    share_kept = torch.linspace(0.9, 0.1, BATCH).view(-1, 1)
    keep = (torch.rand(BATCH, length, generator=generator, dtype=torch.float64) < share_kept).double()
    keep[:, 0] = 1
    return {"ids": ids, "labels": ids.roll(-1, 1), "keep": keep}


def share(inputs: Inputs, parts: int, index: int, *, pads: int = 0) -> Inputs:
    """Return a rank's samples; `pads` appends tokens that do not count, more on each rank."""
    own = {name: value.chunk(parts)[index] for name, value in inputs.items()}
    return {name: F.pad(value, (0, pads * index)) for name, value in own.items()} if pads else own


def train(
    face: str,
    depth: int,
    width: int,
    lengths: list[int],
    make: Callable[[], nn.Module] = Decoder,
    batch: Callable[[int, int], Inputs] = batch_of,
    pads: int = 0,
    options: Mapping[str, Any] | None = None,
    changes: Mapping[int, float] | None = None,
) -> tuple[list[float], dict[str, Tensor], int, list[str]]:
    """Return the losses, the trained weights, the number of captures and the warnings."""
    torch.set_default_dtype(torch.float64)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("varuna").addHandler(handler)
    try:
        torch.manual_seed(SEED)
        model = make()
        wrapped: Any = model
        extra = dict(options or {})
        if face == "varuna":
            sample = {name: value[:2] for name, value in batch(0, lengths[0]).items()}
            wrapped = Varuna(model, stage_map(depth, width), sample, BATCH, 2, device="cpu", **extra)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        if face == "pyrannc":
            wrapped = RaNNCModule(
                model, optimizer, device="cpu", partition_num=depth, pipeline_num=2, **extra
            )
        elif face == "varuna":
            wrapped.set_optimizer(optimizer)
        losses = []
        for step, length in enumerate(lengths):
            inputs = batch(step, length)
            if step in (changes or {}):
                wrapped.sharpness = (changes or {})[step]
            if face == "varuna":
                losses.append(wrapped.step(share(inputs, width, wrapped.rank_within_stage, pads=pads))[0])
            else:
                if face == "pyrannc":
                    inputs = share(inputs, depth * width, dist.get_rank(), pads=pads)
                loss = wrapped(**inputs)
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        if face == "plain":
            return losses, {name: v.detach() for name, v in model.state_dict().items()}, 0, []
        source = wrapped._programs.sampled.source if face == "varuna" else wrapped._partitioned.source
        state = wrapped.full_state_dict() if face == "varuna" else wrapped.state_dict()
        found = losses, {name: v.clone() for name, v in state.items()}, source.num_traces, warnings
        wrapped.close() if face == "varuna" else wrapped.undeploy()
        return found
    finally:
        logging.getLogger("varuna").removeHandler(handler)
        torch.set_default_dtype(torch.float32)


def check(
    pool: Pool, face: str, depth: int, width: int, lengths: list[int], **kwargs: Any
) -> tuple[int, Any]:
    """Compare a run with one plain process; return the number of captures and the warnings."""
    found = pool.run(train, depth * width, face, depth, width, lengths, timeout=300, **kwargs)
    kwargs.pop("pads", None)
    kwargs.pop("options", None)
    losses, state, _, _ = train("plain", 1, 1, lengths, **kwargs)
    for rank, (own, weights, _, _) in enumerate(found):
        assert own == pytest.approx(losses, rel=1e-10), f"rank {rank}"
        check_state(weights, state, f"rank {rank}")
    return max(traces for _, _, traces, _ in found), found[0][3]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_fifty_lengths_are_exact_with_two_captures(pool: Pool, face: str, depth: int, width: int) -> None:
    """EXA-8."""
    lengths = [17, *(2 + 37 * step % 69 for step in range(50 if (depth, width) == (2, 2) else 5))]
    traces, warnings = check(pool, face, depth, width, lengths)
    assert traces <= 2
    assert not [text for text in warnings if "length" in text]


class Causal(Decoder):
    """Computes the same for a sample however long its padding is."""

    scales, num_layers = False, 1


class Fixed(Decoder):
    """Makes an int of its length, so that a capture serves one length only."""

    num_layers = 1

    def forward(self, ids: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
        return super().forward(ids, labels, keep) * (1.0 / int(ids.shape[1]))


def test_replicas_pad_to_lengths_of_their_own(pool: Pool) -> None:
    """EXA-8: each replica pads its share to its own longest sample, as collate functions do."""
    lengths = [17, 9, 21]
    for face, depth in (("varuna", 1), ("varuna", 2), ("pyrannc", 1)):
        traces, _ = check(pool, face, depth, 2, lengths, make=Causal, pads=3)
        assert traces <= 2


def test_ranks_with_other_lengths_are_refused_if_their_samples_become_one_batch(pool: Pool) -> None:
    """EXA-8: with several stages, RaNNC puts the samples of all ranks together."""
    with pytest.raises(AssertionError, match=r"rank 1 calls the model differently.*pad them to the same"):
        pool.run(train, 2, "pyrannc", 2, 1, [9, 12], pads=3)


def test_a_model_that_fixes_its_length_is_captured_for_each_and_stays_exact(pool: Pool) -> None:
    """EXA-8: the warning names the line."""
    lengths = [17, 9, 21, 9]
    for face in FACES:
        traces, warnings = check(pool, face, 2, 1, lengths, make=Fixed)
        assert traces >= 3
        assert any("int(ids.shape[1])" in text and "on its own" in text for text in warnings)


@pytest.mark.parametrize("face", FACES)
def test_a_changed_attribute_gets_captures_of_its_own_for_all_lengths(pool: Pool, face: str) -> None:
    """EXA-5, EXA-8: to another value and back."""
    traces, _ = check(pool, face, 2, 1, [17, 9, 9, 21, 30, 12, 17], make=Causal, changes={2: 0.5, 5: 1.0})
    assert traces <= 4


def images_of(step: int, size: int) -> Inputs:
    """Return images whose height and width differ, first both equal."""
    generator = torch.Generator().manual_seed(step)
    width = size if step < 2 else size + 3 * step
    images = torch.randn(BATCH, 3, size, width, generator=generator, dtype=torch.float64)
    return {"images": images, "targets": torch.randint(0, 5, (BATCH,), generator=generator)}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.adaptive_avg_pool2d(F.relu(self.second(x)), 1)
        return F.cross_entropy(self.head(x.flatten(1)), targets)


def test_image_sizes_differ_and_are_named(pool: Pool) -> None:
    """EXA-8: names tell apart dimensions that are equal at first."""
    names = {"images": {2: "height", 3: "width"}}
    sizes = [16, 24, 20, 33, 18]
    for face in FACES:
        options = {"dynamic_dims": names}
        traces, _ = check(pool, face, 1, 2, sizes, make=Convolutions, batch=images_of, options=options)
        assert traces == 2
