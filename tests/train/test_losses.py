"""Losses that divide by something else than samples equal one process, in both interfaces."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import varuna.train.validate
from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.tasks import SEED, stage_map
from tests.train.faces import FACES, LAYOUTS
from tests.zoo.trial import default_dtype
from varuna import CutPoint, Varuna
from varuna.capture import Captured, Source
from varuna.capture.model.batch import Batch
from varuna.errors import CaptureError
from varuna.types import LOSS_TOTALS, Work

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
BATCH, TOKENS, CLASSES = 7, 5, 3

Loss = Callable[["Tagger", Tensor, Tensor, Tensor], Tensor]


def focal(model: "Tagger", scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).sum() / (labels != -100).sum().clamp(min=1)


def by_class(model: "Tagger", scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A mean of the means of all classes: a total for each class."""
    of_class = F.one_hot(labels.clamp(min=0), CLASSES) * mask.unsqueeze(-1)
    each = scores.square().mean(-1, keepdim=True) * of_class
    return (each.sum((0, 1)) / of_class.sum((0, 1)).clamp(min=1)).mean()


def in_a_loop(model: "Tagger", scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    loss = scores.new_zeros(())
    for i in range(TOKENS - 1):
        loss += F.cross_entropy(scores[:, i], labels[:, i].clamp(min=0), weight=model.class_weights)
    loss /= TOKENS
    return loss


def shifted(model: "Tagger", scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Labels that are written into a new tensor, part by part."""
    own = labels.new_zeros(labels.shape).fill_(-100)
    own[:, :-1] = labels[:, 1:]
    own[:, -1].masked_fill_(mask[:, 0], 1)
    return F.cross_entropy(flat(scores), own.view(-1))


def flat(scores: Tensor) -> Tensor:
    return scores.flatten(0, 1)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores.square().mean(-1) * mask).sum()


LOSSES: dict[str, Loss] = {
    "ignored labels": lambda m, s, y, k: F.cross_entropy(flat(s), y.flatten()),
    "another ignored label": lambda m, s, y, k: F.cross_entropy(
        s.transpose(1, 2), y.clamp(0), ignore_index=1
    ),
    "class weights": lambda m, s, y, k: F.cross_entropy(flat(s), y.flatten(), m.class_weights),
    "smoothed labels": lambda m, s, y, k: F.cross_entropy(
        flat(s), y.flatten(), m.class_weights, label_smoothing=0.1
    ),
    "nll": lambda m, s, y, k: F.nll_loss(flat(s).log_softmax(-1), y.flatten()),
    "probabilities": lambda m, s, y, k: F.cross_entropy(flat(s), flat(s).detach().tanh().softmax(-1)),
    "sum": lambda m, s, y, k: F.cross_entropy(flat(s), y.flatten(), reduction="sum"),
    "sum over a constant": lambda m, s, y, k: F.cross_entropy(flat(s), y.flatten(), reduction="sum") / 17.0,
    "sum over samples": lambda m, s, y, k: s.square().sum() / s.shape[0],
    "sum times a number": lambda m, s, y, k: s.square().sum() * (1.0 / (s.size(0) * s.size(1) - 1)),
    "batchmean": lambda m, s, y, k: F.kl_div(
        s.log_softmax(-1), s.detach().softmax(-1) ** 2, reduction="batchmean"
    ),
    "masked mean": lambda m, s, y, k: masked(s, k) / k.sum(),
    "clamped mask": lambda m, s, y, k: masked(s, k) / k.sum().clamp(min=1),
    "mask and eps": lambda m, s, y, k: masked(s, k) / (k.sum() + 0.5),
    "normalized mask": lambda m, s, y, k: (s.square().mean(-1) * (k / k.sum())).sum(),
    "relative mask": lambda m, s, y, k: (s.square().mean(-1) * (k / k.double().mean())).mean(),
    "if any": lambda m, s, y, k: torch.where(k.sum() > 0, masked(s, k) / k.sum(), 0.0),
    "selected elements": lambda m, s, y, k: s[k].square().mean(),
    "selected labels": lambda m, s, y, k: F.cross_entropy(s[k], y[k].clamp(min=0)),
    "selected sum": lambda m, s, y, k: s[k].square().sum() / s[k].shape[0],
    "focal": focal,
    "written labels": shifted,
    "mean by class": by_class,
    "in a loop": in_a_loop,
    "two denominators": lambda m, s, y, k: (
        F.cross_entropy(flat(s), y.flatten())
        + 0.3 * masked(s, k) / k.sum().clamp(min=1)
        + 0.1 * s.square().mean()
    ),
    "weights decay": lambda m, s, y, k: (
        F.cross_entropy(flat(s), y.flatten()) + 0.01 * m.last.weight.square().sum() + 2.0
    ),
    "stacked": lambda m, s, y, k: torch.stack(
        [F.cross_entropy(flat(s), y.flatten()), s.square().mean()]
    ).mean(),
    "mean over samples": lambda m, s, y, k: ((s.square().mean(-1) * k).sum(1) / k.sum(1).clamp(min=1)).mean(),
}


def several(model: "Tagger", scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Several losses at once: each has a denominator of its own."""
    names = ["class weights", "sum over samples", "clamped mask", "selected labels", "mean by class"]
    terms = [LOSSES[name](model, scores, labels, mask) for name in ("weights decay", *names)]
    return sum(terms[1:], terms[0])


LOSSES["several"] = several
IN_JOBS = ["several", "ignored labels"]
REFUSED: dict[str, Loss] = {"rmse": lambda m, s, y, k: torch.sqrt(s.square().mean())}


class Tagger(nn.Module):
    class_weights: Tensor

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(4, 6), CutPoint(), nn.Linear(6, CLASSES)
        self.register_buffer("class_weights", torch.tensor([0.2, 1.0, 3.0]))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        scores = self.last(self.cut(torch.tanh(self.first(x))))
        return {**LOSSES, **REFUSED}[self.loss](self, scores, labels, mask)


def make_batch(step: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Labels and masks are spread unevenly; the first two samples have none at all."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (BATCH, tokens), generator=generator)
    kept = torch.rand(BATCH, tokens, generator=generator) < torch.arange(BATCH).view(-1, 1) / BATCH
    kept[:2] = False
    kept[-1] = True
    x = torch.randn(BATCH, tokens, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": labels.where(kept, -100), "mask": kept}


def take(batch: dict[str, Tensor], parts: int, index: int) -> dict[str, Tensor]:
    return {name: value.tensor_split(parts)[index] for name, value in batch.items()}


def train(
    face: str, depth: int, width: int, losses: list[str], chunk: int = 2, **options: Any
) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Train each model for two steps, the second with accumulated gradients and clipping."""
    torch.set_default_dtype(torch.float64)
    found = {}
    try:
        for name in losses:
            torch.manual_seed(SEED)
            found[name] = run_one(face, depth, width, Tagger(name), chunk, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def run_one(
    face: str, depth: int, width: int, model: nn.Module, chunk: int, *, mapping: str = "", **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    wrapped: Any = model
    if face == "varuna":
        wrapped = Varuna(
            model,
            mapping or stage_map(depth, width),
            take(make_batch(9), 2, 0),
            BATCH,
            chunk,
            device="cpu",
            from_cache=False,
            **options,
        )
        if mapping:  # replicas of this rank's stage
            width = len(mapping.split(";")[wrapped.stage].split(","))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    if face == "varuna":
        wrapped.set_optimizer(optimizer)
    elif face == "pyrannc":
        options = {"pipeline_num": 3, **(options or {"partition_num": depth})}
        wrapped = RaNNCModule(model, optimizer, device="cpu", **options)

    def step(number: int) -> float:
        batch = make_batch(number)
        if face == "varuna":
            loss, _ = wrapped.step(take(batch, width, wrapped.rank_within_stage))
            return float(loss)
        own = take(batch, dist.get_world_size(), dist.get_rank()) if face == "pyrannc" else batch
        loss = wrapped(**own)
        loss.backward()
        return float(loss.detach())

    values = [step(0)]
    optimizer.step()
    optimizer.zero_grad()
    values += [step(1), step(2)]
    torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
    optimizer.step()
    if face == "varuna":
        values.append(wrapped.evaluate(take(make_batch(3), width, wrapped.rank_within_stage)))
        state = wrapped.full_state_dict()
        wrapped.close()
    else:
        with torch.no_grad():
            batch = make_batch(3)
            own = take(batch, dist.get_world_size(), dist.get_rank()) if face == "pyrannc" else batch
            values.append(float(wrapped.eval()(**own)))
        state = {n: value.clone() for n, value in wrapped.state_dict().items()}
        if face == "pyrannc":
            wrapped.undeploy()
    return values, state


def compare(found: Any, expected: Any, **tolerances: float) -> None:
    for name, both in expected.items():
        for own, other in zip(found[name], both, strict=True):
            torch.testing.assert_close(own, other, **(tolerances or EXACT), msg=lambda m, n=name: f"{n}: {m}")


def test_every_kind_of_denominator_is_found_at_every_length() -> None:
    """EXA-2: ignored labels, class weights, masks, sums, means by class; in parts without a counted label.

    EXA-8: a capture for all lengths divides by the totals of each, also with one sample.
    """
    with default_dtype(torch.float64):
        for name in LOSSES:
            for tokens in (TOKENS, 9, 12):
                check_parts(name, make_batch(4, tokens), [0, 1, 3, BATCH])
            assert source_of(name).num_traces <= 4, name  # two with one sample


def test_micro_batches_of_one_sample_and_one_stage_are_exact() -> None:
    """EXA-2: a graph of one sample does not show the batch."""
    compare(train("varuna", 1, 1, ["several"], chunk=1), train("plain", 1, 1, ["several"]))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_a_loss_is_divided_by_the_total_of_the_whole_batch(
    pool: Pool, face: str, depth: int, width: int
) -> None:
    """EXA-2: over stages and replicas, with several denominators, with one, with none; without being told."""
    expected = train("plain", 1, 1, IN_JOBS)
    for found in pool.run(train, depth * width, face, depth, width, IN_JOBS):
        compare(found, expected)


WITH_OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (3, {"mapping": "0,1;2;", "recompute": True, "schedule": "zero-bubble"}),
    (3, {"mapping": "0;1,2;", "schedule": "gpipe"}),
    (3, {"mapping": "0,1,2;", "shard_optimizer": True}),
    (4, {"mapping": "0,2;1,3;", "recompute": True, "schedule": "zero-bubble-2x"}),
]


@pytest.mark.parametrize(("world", "options"), WITH_OPTIONS)
def test_a_loss_with_totals_is_exact_with_any_replicas_and_options(
    pool: Pool, world: int, options: dict[str, Any]
) -> None:
    """EXA-2: shares that differ, stages with different replicas, recompute, zero-bubble, sharded updates."""
    expected = train("plain", 1, 1, ["several"])
    for found in pool.run(train, world, "varuna", 0, 0, ["several"], **options):
        compare(found, expected)


def test_a_loss_with_totals_is_exact_with_any_replicas_in_pyrannc(pool: Pool) -> None:
    """EXA-2: stages with two replicas and one, and three replicas of seven samples."""
    expected = train("plain", 1, 1, IN_JOBS)
    for replicas in ((2, 1), (3,)):
        for found in pool.run(train, 3, "pyrannc", 0, 0, IN_JOBS, replica_num=replicas):
            compare(found, expected)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_loss_with_totals_is_scaled_and_weighed_in_low_precision(pool: Pool, precision: str) -> None:
    """EXA-2: numbers of the whole batch are not rounded to the precision of the values they divide."""
    losses = ["several", "sum times a number"]
    expected = train("varuna", 1, 1, losses, chunk=BATCH, precision=precision)
    for found in pool.run(train, 2, "varuna", 1, 2, losses, precision=precision):
        compare(found, expected, rtol=5e-3, atol=2e-3)


IN_PARTS = ["class weights", "if any", "selected elements", "mask and eps"]
MASKS = st.lists(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS), min_size=BATCH, max_size=BATCH)


@settings(max_examples=25, deadline=None)
@given(mask=MASKS, splits=st.sets(st.integers(1, BATCH - 1)), name=st.sampled_from(IN_PARTS))
def test_any_masks_and_any_parts_add_up(mask: list[list[bool]], splits: set[int], name: str) -> None:
    """EXA-2: parts without a counted label add nothing; a batch without any is as in one process."""
    batch = make_batch(4)
    batch["mask"] = torch.tensor(mask)
    batch["labels"] = batch["labels"].clamp(min=0).where(batch["mask"], -100)
    with default_dtype(torch.float64):
        check_parts(name, batch, [0, *sorted(splits), BATCH])


def check_parts(name: str, batch: dict[str, Tensor], bounds: list[int]) -> None:
    """Compare the sum over parts with the plain model, in one process."""
    model = make_tagger(name)
    tokens = batch["x"].shape[1]
    captured = capture(name, 2, tokens)
    weights = dict(model.named_parameters())
    expected = gradients_of(model(**batch), weights)
    tensors = {**weights, **dict(model.named_buffers())}
    program = captured.carve(0, captured.num_segments)
    totals = None
    if program.totals is not None:
        totals = program.totals(tensors.__getitem__, batch, BATCH, torch.device("cpu"))
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    for first, stop in pairwise(bounds):
        own = capture(name, min(stop - first, 2), tokens).carve(0, captured.num_segments)
        part = {name: value[first:stop] for name, value in batch.items()} | {LOSS_TOTALS: totals}
        (loss,) = own([tensors[name] for name in own.state], [], part, Work(0, 0, 0))
        share = 1.0 if captured.loss.sums[0] else (stop - first) / BATCH
        for key, value in gradients_of(loss, weights).items():
            found[key] += share * value
    torch.testing.assert_close(found, expected, **EXACT, equal_nan=True, msg=lambda m: f"{name}: {m}")


def gradients_of(loss: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(weights.values()))
    return {"loss": loss.detach(), **dict(zip(weights, found, strict=True))}


@cache
def make_tagger(name: str) -> Tagger:
    torch.manual_seed(SEED)
    return Tagger(name).double()


@cache
def source_of(name: str) -> Source:
    return Source(make_tagger(name))


@cache
def capture(name: str, size: int, tokens: int) -> Captured:
    inputs = {key: value[:size] for key, value in make_batch(0, tokens).items()}
    return source_of(name).capture(inputs, training=True, batch=Batch(size, dict.fromkeys(inputs, 0)))


class Language(nn.Module):
    """GPT-2, or BERT with two losses, from Hugging Face."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 20, "attn_implementation": "eager"}
        if kind == "gpt2":
            drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            config: Any = transformers.GPT2Config(
                n_embd=8, n_layer=2, n_head=2, n_positions=8, **sizes, **drops
            )
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            layers = {
                "hidden_size": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 16,
            }
            config = transformers.BertConfig(max_position_embeddings=8, **layers, **sizes, **drops)
            self.model = transformers.BertForPreTraining(config)

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        ids = (x[..., 0] * 7).long() % 20
        extra = {"next_sentence_label": mask[:, 1].long()} if hasattr(self.model, "cls") else {}
        found: Tensor = self.model(input_ids=ids, labels=labels, **extra).loss
        return found


def train_languages(face: str, depth: int, width: int) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        found = {}
        for kind in ("gpt2", "bert"):
            torch.manual_seed(SEED)
            found[kind] = run_one(face, depth, width, Language(kind), 2)
        return found
    finally:
        torch.set_default_dtype(torch.float32)


def test_hugging_face_labels_of_minus_100_are_exact(pool: Pool) -> None:
    """EXA-2: GPT-2, and BERT with the losses of words and of sentences, each with its own count."""
    expected = train_languages("plain", 1, 1)
    for face, depth, width in (("varuna", 2, 2), ("pyrannc", 2, 1)):
        for found in pool.run(train_languages, depth * width, face, depth, width):
            compare(found, expected, rtol=1e-5, atol=1e-6)  # they compute their losses in fp32


def dice(model: Tagger, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    shares = scores.sigmoid().mean(-1)
    return 1 - 2 * (shares * mask).sum() / (shares.sum() + mask.sum())


def perplexity(model: Tagger, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(flat(scores), labels.flatten()).exp()


def centred(model: Tagger, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (scores - scores.mean(0)).square().mean()


def balanced(model: Tagger, scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A balance of experts over the batch, as in a mixture of experts."""
    chosen = F.one_hot(scores.argmax(-1), CLASSES).to(scores.dtype).mean((0, 1))
    return LOSSES["masked mean"](model, scores, labels, mask) + 0.1 * (chosen * scores.mean((0, 1))).sum()


@pytest.mark.parametrize("loss", [REFUSED["rmse"], dice, perplexity, centred, balanced])
def test_losses_that_are_no_mean_are_refused_with_their_line(
    loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXA-2: also with samples that are all alike; not with one micro-batch, nor with a weight."""
    monkeypatch.setitem(REFUSED, "refused", loss)
    batch = {name: value.float() if name == "x" else value for name, value in make_batch(0).items()}
    alike = {name: torch.zeros_like(value) for name, value in batch.items()}
    for sample in (batch, alike) if loss is not balanced else (batch,):
        with pytest.raises(
            CaptureError, match=r"test_losses\.py:\d+.*micro-batches and replicas.*loss_weight"
        ):
            Varuna(Tagger("refused"), "0;", sample, BATCH, 2, device="cpu", from_cache=False)
    Varuna(Tagger("refused"), "0;", batch, BATCH, BATCH, device="cpu", from_cache=False).close()
    weight: Any = lambda inputs: len(inputs["x"])  # noqa: E731
    Varuna(
        Tagger("refused"), "0;", batch, BATCH, 2, device="cpu", from_cache=False, loss_weight=weight
    ).close()


@pytest.mark.parametrize("loss", [REFUSED["rmse"], dice, centred, balanced])
@pytest.mark.parametrize("place", ["meta", "large"])
def test_losses_of_models_too_large_to_run_are_compared_by_their_last_part(
    loss: Loss, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXA-2: what follows the values of single samples runs on other numbers; right losses are accepted."""
    monkeypatch.setattr(varuna.train.validate, "CHECKED_PARAMETERS", 20)
    batch = {name: value.float() if name == "x" else value for name, value in make_batch(0).items()}

    def wrap(loss: Loss) -> None:
        monkeypatch.setitem(REFUSED, "refused", loss)
        with torch.device("meta" if place == "meta" else "cpu"):
            model = Tagger("refused")
        fill: Any = {"initialize": lambda name, tensor: tensor.fill_(0.1)} if place == "meta" else {}
        Varuna(model, "0;", batch, BATCH, 2, device="cpu", from_cache=False, **fill).close()

    with pytest.raises(CaptureError, match=r"test_losses\.py:\d+.*from two parts.*loss_weight"):
        wrap(loss)
    wrap(lambda m, s, y, k: torch.sort(s.square().mean((1, 2)))[0].sum() + LOSSES["several"](m, s, y, k))


def test_a_loss_that_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXA-2: a doubt in the middle of a large model leaves too many parameters after it."""
    monkeypatch.setattr(varuna.train.validate, "CHECKED_PARAMETERS", 20)
    monkeypatch.setitem(REFUSED, "refused", LOSSES["sum"])
    batch = {name: value.float() if name == "x" else value for name, value in make_batch(0).items()}
    model = Tagger("refused")
    model.cut.register_forward_hook(lambda module, args, h: h - h.mean(0))
    with pytest.raises(CaptureError, match=r"more than 20\. So its gradients may change.*loss_weight"):
        Varuna(model, "0;", batch, BATCH, 2, device="cpu", from_cache=False)


class DividedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / len(grad)


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted": lambda h: h.sort(0)[0],
    "positions": lambda h: h * torch.arange(len(h)).view(-1, 1, 1),
    "attention": lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "convolution": lambda h: F.conv1d(h.permute(1, 2, 0), torch.ones(6, 6, 3), padding=1).permute(2, 0, 1),
    "triangle": lambda h: h.transpose(0, 1).tril().transpose(0, 1),
    "backward": DividedGradient.apply,
}


@pytest.mark.parametrize("how", COUPLED)
def test_operations_that_couple_samples_are_found_by_comparing(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EXA-2: no rule forbids these operations, because they can also work on single samples."""
    monkeypatch.setitem(REFUSED, "refused", LOSSES["ignored labels"])
    batch = {name: value.float() if name == "x" else value for name, value in make_batch(0).items()}
    model = Tagger("refused")
    model.cut.register_forward_hook(lambda module, args, h: COUPLED[how](h))
    found = r"differs from the model itself" if how == "backward" else r"test_losses\.py:\d+.*from two parts"
    with pytest.raises(CaptureError, match=found):
        Varuna(model, "0;", batch, BATCH, 2, device="cpu", from_cache=False)


def test_positions_that_only_choose_a_row_of_each_sample_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EXA-2: `x[torch.arange(len(x)), last]` stays right."""
    monkeypatch.setitem(REFUSED, "refused", lambda m, s, y, k: s[torch.arange(len(s)), k.sum(1) - 1].mean())
    batch = {name: value.float() if name == "x" else value for name, value in make_batch(0).items()}
    Varuna(Tagger("refused"), "0;", batch, BATCH, 2, device="cpu", from_cache=False).close()


def test_large_mixtures_of_experts_are_known_to_be_separable(monkeypatch: pytest.MonkeyPatch) -> None:
    """EXA-2: counts of rows for each expert divide the rows of a micro-batch; nothing has to be compared."""
    monkeypatch.setattr(varuna.train.validate, "CHECKED_PARAMETERS", 20)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.MixtralConfig(max_position_embeddings=8, **sizes, **heads)
    tokens = torch.randint(20, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    model = transformers.MixtralForCausalLM(config)
    Varuna(model, "0;", batch, 4, 2, device="cpu", from_cache=False).close()
    config.output_router_logits = True  # the balance of experts couples the samples
    with pytest.raises(CaptureError, match=r"moe|mixtral.*loss_weight"):
        coupled = transformers.MixtralForCausalLM(config)
        Varuna(coupled, "0;", batch, 4, 2, device="cpu", from_cache=False)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(4, 6), CutPoint(), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.cut(torch.tanh(self.first(x))))
        return found


def train_outside(depth: int, width: int) -> tuple[dict[str, Tensor], str]:
    """The loss is computed by the script; it divides by this rank's labels."""
    torch.manual_seed(SEED)
    model = Scores().double()
    batch = make_batch(0)
    batch["labels"] = batch["labels"].roll(1, 0)
    wrapped: Any = model
    if depth:
        batch = take(batch, depth * width, dist.get_rank())
        count: Any = lambda inputs: (batch["labels"] != -100).sum()  # noqa: E731
        options: Any = {"partition_num": depth, "pipeline_num": 2}
        wrapped = RaNNCModule(model, device="cpu", loss_weight=count, **options)
    scores = wrapped(batch["x"])
    F.cross_entropy(flat(scores), batch["labels"].flatten()).backward()
    if not depth:
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, ""
    found = {name: wrapped.get_param_grad(name) for name in Scores().state_dict()}
    wrapped.undeploy()
    refused = ""
    try:
        RaNNCModule(Tagger("rmse").double(), device="cpu", **options)(
            **take(make_batch(0), 2, dist.get_rank())
        )
    except Exception as error:
        refused = str(error)
    return found, refused


def test_a_loss_outside_the_model_is_weighed_by_a_function_of_the_script(pool: Pool) -> None:
    """EXA-2: `loss_weight` in pyrannc; a loss inside that is no mean is refused there, too."""
    expected, _ = train_outside(0, 0)
    for depth, width in ((1, 2), (2, 1)):
        for found, refused in pool.run(train_outside, depth * width, depth, width):
            torch.testing.assert_close(found, expected, **EXACT)
            assert "scalar_outputs" in refused, refused
