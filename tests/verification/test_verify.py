"""B1, PRO-1: `varuna.verify` accepts right models, finds wrong ones, and names the place."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from torch import nn

import pyrannc.partitioning
import varuna
from benchmarks.verify import verify_case
from tests.capture.test_wrong_captures import WRONG
from tests.capture.wrong_captures import LanguageModel, corrupt, sentences
from tests.verification import wrong_models
from tests.verification.wrong_models import Chaotic, InPlace, InPlaceNested, Layers, Normalized, samples
from tests.zoo.tours import case_of
from varuna.capture import Captured, Source
from varuna.codec import encode
from varuna.errors import VarunaError
from varuna.observe.progress_bar import parts_progress
from varuna.train import build
from varuna.verification import coordinator
from varuna.verification.layouts import parse_layouts
from varuna.verification.locate import changing_operation, coupling_operation
from varuna.verification.plain import PlainRun
from varuna.verification.report import overall
from varuna.verification.subject import make_subject
from varuna.verification.wrapped import Face

SEVERAL = "1x1:chunk=8,2x1:recompute,1x2:shard,2+1:1f1b:chunk=3"


@pytest.mark.parametrize("face", ["varuna", "pyrannc"])
def test_a_right_model_is_equal_at_every_layout(face: Face) -> None:
    """B1, PRO-1: and verify leaves it as it is. It reports each part of its work before it begins."""
    model = Layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts: list[tuple[int, int, str]] = []
    report = varuna.verify(
        model, samples(8), layouts=SEVERAL, face=face, progress=lambda *part: parts.append(part)
    )
    assert report.is_equal and report.exit_code == 0, str(report)
    assert [result.processes for result in report.layouts] == [1, 2, 2, 3]
    assert all(max(result.largest.values()) < 1e-12 for result in report.layouts)
    assert {*report.layouts[0].largest} >= {"loss", "gradient", "parameter", "buffer"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.grad is None for p in model.parameters())
    assert [what for *_, what in parts] == [
        "capturing the model",
        "training in one plain process",
        *(f"training at {layout}" for layout in SEVERAL.split(",")),
    ]
    assert [(done, total) for done, total, _ in parts[1:]] == [(1, 7), (3, 7), (4, 7), (5, 7), (6, 7)]


def test_every_parameter_has_its_largest_difference() -> None:
    """B1, PRO-1: also where all are equal; the largest first, as values, as JSON and as a table."""
    model = Normalized()
    report = varuna.verify(model, samples(8), layouts="2x1:chunk=8", precision="fp32", steps=2)
    (result,) = report.layouts
    names = {name for name, _ in model.named_parameters()}
    assert {one.name for one in result.tensors if one.kind == "parameter"} == names
    assert {one.name for one in result.tensors if one.kind == "buffer"} == {
        name for name, _ in model.named_buffers()
    }
    for one in result.tensors:
        assert one.value is not None and (one.gradient is None) == (one.kind == "buffer")
    sizes = [one.largest for one in result.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert max(one.gradient or 0.0 for one in result.tensors) == result.largest["gradient"]
    values = [one.value or 0.0 for one in result.tensors if one.kind == "parameter"]
    assert max(values) == result.largest["parameter"]
    assert {row["name"] for row in json.loads(encode(report))["layouts"][0]["tensors"]} >= names
    lines = report.tensor_table().splitlines()
    assert lines[0] == "2x1:chunk=8:" and all(any(name in line for line in lines) for name in names)


def test_the_progress_bar_names_the_part_that_runs() -> None:
    """B1, PRO-1: on a terminal; elsewhere it is logged."""
    seen = io.StringIO()
    with parts_progress(Console(file=seen, force_terminal=True, width=100)) as progress:
        progress(3, 7, "training at 2x1")
    assert "training at 2x1" in seen.getvalue() and "3/7" in seen.getvalue()


def test_statistics_of_micro_batches_are_compared_with_the_same_micro_batches() -> None:
    """B1, PRO-1: BatchNorm sees a micro-batch at once; batches of other sizes; an optimizer of the model."""
    model = Normalized()
    report = varuna.verify(
        model,
        make_batch=lambda step: samples((7, 5, 7)[step]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        layouts="1x2:chunk=4,2x1:chunk=5",
    )
    assert report.is_equal, str(report)
    assert report.batch_size == 7


@pytest.mark.parametrize(("texts", "verified"), [("1x1:chunk=3,2x1:chunk=1", ["1x1:chunk=3"]), ("1x2", [])])
def test_a_batch_of_one_sample_leaves_the_layouts_that_run_it_whole(texts: str, verified: list[str]) -> None:
    """B1, PRO-1: BatchNorm refuses a single sample in a micro-batch. Nothing verified is not "equal"."""
    chosen = patch.object(coordinator, "chosen_layouts", lambda **_: parse_layouts(texts))
    with chosen:
        report = varuna.verify(Pictures(), make_batch=lambda step: pictures((3, 1, 3)[step]))
    assert [one.layout for one in report.layouts] == verified
    if verified:
        assert report.is_equal, str(report)
    else:
        assert report.exit_code == 2 and "failed: no layout can be verified: a batch has" in str(report)
    assert overall(()) == "failed"


@pytest.mark.parametrize("face", ["varuna", "pyrannc"])
def test_gradients_that_the_optimizer_does_not_know_are_cleared(face: Face) -> None:
    """B1, PRO-1: only the head is trained, while the other parameters keep requires_grad."""
    model = Layers()
    optimizer = torch.optim.SGD(model.c.parameters(), lr=0.1)
    report = varuna.verify(
        model, samples(8), optimizer=optimizer, layouts="1x1,2x1", steps=2, face=face, precision="fp64"
    )
    assert report.is_equal, str(report)


@pytest.mark.parametrize("precision", ["fp32"])
def test_rounding_of_a_sensitive_model_is_no_difference(precision: str) -> None:
    """B1, PRO-1: the last bits of its own weights move its losses as far."""
    report = varuna.verify(Chaotic(), samples(8), layouts="1x2:chunk=1", precision=precision, steps=2)
    assert report.is_equal and report.precision == precision, str(report)
    assert max(report.layouts[0].largest.values()) > 1e-5  # above what the precision alone explains


@pytest.mark.parametrize("name", ["nested in and out"])
def test_models_of_the_zoo_give_no_false_alarm(name: str) -> None:
    """B1, PRO-1: `python -m benchmarks.verify --zoo` verifies all of them."""
    report = verify_case(case_of(name), layouts="1x2")
    assert report.is_equal, str(report)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Counter", "h * self.calls"),
        ("HiddenCounter", "return h * next(self.count): it computes something else when it runs again"),
        ("CoupledLoss", "return (h - y).mean() ** 2: the loss is"),
        ("InPlace", "forward changes its input 'x' in place"),
        ("Unrepeatable", 'return h * (1 + int.from_bytes(os.urandom(4), "big") * 1e-9): it computes'),
        (
            "UnrepeatableBackward",
            'return grads[0] * (1 + int.from_bytes(os.urandom(4), "big") * 1e-9): it computes something else',
        ),
        ("WrongBackward", "return TimesBatch.apply(h)"),
        ("SortedSamples", "h.sort(0).values"),
    ],
)
def test_a_wrong_model_is_found_and_named(name: str, words: str) -> None:
    """B1, PRO-1: by Varuna's refusal, or by the first operation where the numbers part."""
    report = varuna.verify(getattr(wrong_models, name)(), samples(8), layouts="1x1:chunk=4")
    assert report.exit_code == 1 and words in str(report), str(report)


def test_a_model_that_differs_from_itself_is_named_as_the_cause() -> None:
    """B1, PRO-1: the number, and the operation that makes it; no layout is trained."""
    report = varuna.verify(wrong_models.Unrepeatable(), samples(8), layouts="1x1,2x1")
    start = "differs: the plain process computes something else when it runs again: step 0: the loss differs"
    assert report.verdict.startswith(start) and report.layouts == (), str(report)
    named = r"First operation: aten\.mul.* at .*wrong_models.py:\d+: return h \*"
    assert re.search(named, report.verdict), report.verdict


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Let wrong captures through: Varuna compares each capture with the model before training."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    with (
        patch.object(build, "check", nothing),
        patch.object(pyrannc.partitioning, "check_once", nothing),
        patch.object(pyrannc.partitioning, "refuse_coupled_losses", nothing),
    ):
        yield


@pytest.mark.parametrize(
    ("name", "face", "words"),
    [
        ("another eps", "varuna", "step 0: the loss differs.*layer_norm.*h = self.norm"),
        ("lost custom backward", "pyrannc", r"gradient of 'blocks.0.down.bias'.*the backward of linear"),
        ("counter not updated", "varuna", "step 0: the buffer 'steps' differs by 1"),
        ("causal mask shifted", "pyrannc", r"First operation: triu.*\.triu\(1\)"),
    ],
)
def test_a_wrong_capture_is_found_and_its_operation_named(
    name: str, face: Face, words: str, unchecked: None
) -> None:
    """B1, PRO-1: by the comparison of the trained layouts alone."""
    wrong = WRONG[name]

    class WrongSource(Source):
        def capture(self, *args: Any, **options: Any) -> Captured:
            captured = super().capture(*args, **options)
            if "carve" not in vars(captured):
                corrupt(captured, wrong.operation, wrong.change, wrong.number)
            return captured

    with patch.object(coordinator, "Source", WrongSource):
        report = varuna.verify(LanguageModel(), sentences(4), layouts="2x1:chunk=4", face=face)
    assert report.exit_code == 1, str(report)
    assert re.search(words, str(report.layouts[0].first)), str(report)


def test_an_input_that_only_the_plain_process_changes_is_found() -> None:
    """B1, PRO-1: a batch that is used again would be another one."""

    def trained_on_copies(self: Any, inputs: Any, **options: Any) -> Any:
        copies = {name: value.clone() for name, value in inputs.items()}
        return original(self, copies, **options)

    original = varuna.Varuna.step
    with (
        patch.object(varuna.Varuna, "step", trained_on_copies),
        patch("varuna.capture.graph.checks.refuse_changed_inputs", lambda flow: None),
        patch.object(build, "check", lambda *_: None),
    ):
        report = varuna.verify(InPlace(), samples(8), layouts="1x1:chunk=8")
    first = report.layouts[0].first
    assert first is not None and (first.step, first.kind, first.name) == (0, "input", "x"), str(report)


def test_no_operation_is_blamed_for_an_input_that_forward_changes() -> None:
    """B1, PRO-1: a forward that runs again, or on fewer samples, gets the same inputs, also nested ones."""
    x, y = samples(8).values()
    made = {"model": InPlaceNested(), "sample": {"xs": [x], "y": {"a": y}}}
    subject = make_subject(made, steps=1, batch_size=None)
    run = PlainRun(subject, precision="fp32", draws={}, sums=False)
    assert changing_operation(subject, run) is None
    assert coupling_operation(subject, run, 4, 1e-3) is None


def test_a_parameter_that_no_rank_holds_is_found() -> None:
    """B1, PRO-1: a layout that loses a parameter has nothing to compare it with."""

    def without_b(self: Any, *arguments: Any, **options: Any) -> Any:
        return ((n, p) for n, p in original(self, *arguments, **options) if not n.startswith("b."))

    original = varuna.Varuna.named_parameters
    with patch.object(varuna.Varuna, "named_parameters", without_b):
        report = varuna.verify(Layers(), samples(8), layouts="1x1:chunk=8", steps=1)
    first = report.layouts[0].first
    assert first is not None and first.kind == "gradient" and first.name.startswith("b."), str(report)
    assert report.exit_code == 1


class Pictures(nn.Module):
    """BatchNorm2d takes a batch of one picture: it has several pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Linear(3 * 4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.b(self.norm(self.a(x)).relu().flatten(1)), y)


def pictures(number: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(number)
    return {
        "x": torch.randn(number, 2, 3, 3, generator=numbers),
        "y": torch.randn(number, 2, generator=numbers),
    }


class Endless(Layers):
    def middle(self, h: torch.Tensor) -> torch.Tensor:
        while True:
            h = h + 0


def test_a_forward_that_never_ends_is_given_up() -> None:
    """B1, PRO-1: also in the capture, which is not a process of its own."""
    with pytest.raises(VarunaError, match="capturing the model takes more than 2 s"):
        varuna.verify(Endless(), samples(8), layouts="1x1", precision="fp32", timeout_seconds=0.1)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.a(x[:, :5]).mean())


def test_a_model_that_fails_without_varuna_is_no_finding() -> None:
    """B1, PRO-1"""
    with pytest.raises(VarunaError, match="in one plain process, without Varuna: RuntimeError"):
        varuna.verify(Broken(), samples(8), layouts="1x1")


class Infinite(Layers):
    def loss(self, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(h, y) * math.nan


def test_losses_that_are_not_finite_are_not_equal() -> None:
    """B1, PRO-1: where every number is nan, no mistake shows."""
    report = varuna.verify(Infinite(), samples(8), layouts="1x1:chunk=4", steps=2)
    assert (report.status, report.exit_code) == ("failed", 2)
    assert "the loss of the plain process is nan at step 0" in report.verdict


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layouts": "2by1"}, "'2by1' is not a layout"),
        ({"layouts": "2x1:fast"}, "'fast', which is none of varuna, 1f1b"),
        ({"layouts": ""}, "no layout is given"),
        ({"face": "ddp"}, "face must be one of varuna, pyrannc"),
        ({"precision": "int8"}, "precision must be one of fp64, fp32"),
        ({"steps": 0}, "steps must be a positive whole number"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be above 0, not 0"),
        ({"sample": 3}, "the sample gave a int; expected the model's inputs"),
        ({"sample": samples(8)["x"]}, "cannot be called with them: missing a required argument: 'y'"),
        ({"optimizer": "adam"}, "optimizer must be a torch optimizer"),
        ({"bath_dims": {}}, "bath_dims is no option of verify"),
        ({"sample": None}, "there are no inputs"),
        ({"sample": samples(0)}, "the sample has no rows"),
        ({"sample": None, "make_batch": lambda step: samples(0)}, "a batch has no sample"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    """B1, PRO-1"""
    given = {"sample": samples(8), "layouts": "1x1", **options}
    with pytest.raises((ValueError, TypeError)) as refusal:
        varuna.verify(Layers(), **given)
    assert words in str(refusal.value)
