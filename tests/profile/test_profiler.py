"""Profiles: complete, measured once, extended, and refused if they belong to another model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from tests.profile import ladders
from tests.profile.ladders import MESSAGES, WIDTH, Ladder, get_batch
from tests.toys import make_inputs, make_model
from varuna.codec import decode, encode
from varuna.errors import CaptureError
from varuna.plan.profile_file import NAME, UNFINISHED, read_profile
from varuna.profile.profiler import Profiler, same_optimizer
from varuna.types import Profile

MakeProfiler = Callable[..., Profiler]


@pytest.fixture(autouse=True)
def all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladders, "largest", 1 << 30)
    ladders.ran.clear()


def sizes_of(profile: Profile) -> list[list[int]]:
    return [[size.microbatch_size for size in kind.sizes] for kind in profile.kinds]


def test_a_profile_holds_all_costs(make_profiler: MakeProfiler, tmp_path: Path) -> None:
    """V24: compute, memory, link and all-reduce, with one device, in a documented JSON format."""
    profile = make_profiler(Ladder(5)).profile_all([1, 2, 4])
    assert profile.segments == (0, 1, 1, 1, 2)
    assert sizes_of(profile) == [[1, 2, 4]] * 3
    parts = ("forward", "forward_only", "backward", "backward_inputs", "backward_weights")
    for cost in (cost for kind in profile.kinds for cost in kind.sizes):
        assert all(getattr(cost, part).seconds > 0 for part in parts)
        assert cost.activation_bytes > 0 and cost.working_bytes > 0
    weights = WIDTH * WIDTH + WIDTH
    assert {(kind.num_trained, kind.gradient_bytes, kind.parameter_bytes) for kind in profile.kinds} == {
        (weights, 4 * weights, 4 * weights)
    }
    assert {(cut.sent.size(3), cut.returned.size(3)) for cut in profile.cuts} == {(3 * WIDTH * 4,) * 2}
    assert profile.sample_bytes == 2 * WIDTH * 4
    assert profile.optimizer.name == "AdamW" and profile.optimizer.seconds_per_element > 0
    assert 8 <= profile.optimizer.state_bytes_per_element < 9
    assert profile.overheads.instruction_seconds > 0 and profile.overheads.step_seconds > 0
    assert profile.within is not None
    assert tuple(message.num_bytes for message in profile.within.messages) == MESSAGES
    for message in profile.within.messages:
        assert message.both_ways.seconds >= message.one_way.seconds > 0
        assert message.sender_seconds > 0 and message.receiver_seconds > 0
    assert {(cost.group_size, cost.between_machines) for cost in profile.reductions} == {(2, False)}
    assert all(cost.sharing is not None and cost.sharing.seconds > 0 for cost in profile.reductions)
    assert profile.between is None and any(note.startswith("between: ") for note in profile.notes)
    assert profile.fixed_bytes > 0 and profile.device_memory_bytes > 0
    assert profile.device.startswith("cpu (") and profile.precision == "fp32"
    assert read_profile(tmp_path) == read_profile(tmp_path / NAME) == profile
    assert decode(encode(profile), Profile) == profile


def test_identical_segments_are_measured_once(make_profiler: MakeProfiler, tmp_path: Path) -> None:
    """V24: twice as many steps that are alike run not once more often."""
    counts = {}
    for steps in (12, 24):
        ladders.ran.clear()
        make_profiler(Ladder(steps, ticks=True), out_folder=tmp_path / str(steps)).profile_all([2])
        counts[steps] = ladders.ran["tick"]
    assert counts[12] == counts[24] > 0


def test_a_profile_that_is_complete_is_not_measured_again(make_profiler: MakeProfiler) -> None:
    first = make_profiler(Ladder(4, ticks=True)).profile_all([1, 2])
    ladders.ran.clear()
    assert make_profiler(Ladder(4, ticks=True)).profile_all([2]) == first
    assert ladders.ran["tick"] == 0


def test_a_profile_is_extended_by_a_size(make_profiler: MakeProfiler, tmp_path: Path) -> None:
    """V24: what was there stays to the bit."""
    first = make_profiler(Ladder(4)).profile_all([1, 4])
    more = make_profiler(Ladder(4)).profile_all([2])
    assert sizes_of(more) == [[1, 2, 4]] * 3
    for before, after in zip(first.kinds, more.kinds, strict=True):
        assert before.sizes == (after.sizes[0], after.sizes[2])
    assert (more.within, more.overheads, more.optimizer) == (first.within, first.overheads, first.optimizer)
    assert read_profile(tmp_path) == more


def test_add_to_existing_false_measures_everything_again(make_profiler: MakeProfiler) -> None:
    make_profiler(Ladder(4)).profile_all([1, 2])
    assert sizes_of(make_profiler(Ladder(4), add_to_existing=False).profile_all([4])) == [[4]] * 3


def test_another_optimizer_replaces_the_first(make_profiler: MakeProfiler) -> None:
    make_profiler(Ladder(4)).profile_all([2])
    profiler = make_profiler(Ladder(4))
    profiler.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert (found := profiler.profile_all([2])).optimizer.name == "SGD"
    assert found.optimizer.state_bytes_per_element == 0
    assert make_profiler(Ladder(4)).profile_all([2]).optimizer == found.optimizer
    model = Ladder(4)
    profiler = make_profiler(model)
    profiler.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    # The same by name: what is known of it stays.
    assert profiler.profile_all([2]).optimizer == found.optimizer


def test_the_older_form_of_the_call_works(make_profiler: MakeProfiler, tmp_path: Path) -> None:
    profiler = Profiler(Ladder(3), "cpu", fp16=False, effort=ladders.BRIEF)
    profiler.initialize(get_batch)
    profile = profiler.profile_all(get_batch, [1, 2], out_folder=tmp_path / "saved")
    assert read_profile(tmp_path / "saved") == profile
    assert sizes_of(profile) == [[1, 2]] * 3


def test_the_original_s_arguments_are_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """V24: by position and by name; segments that another run has measured are kept."""
    model = Ladder(3)
    profiler = Profiler(
        model, get_batch, "cpu", None, False, tmp_path, [0], False, True, effort=ladders.BRIEF
    )
    assert "pstages_to_profile has no effect" in caplog.text
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler.set_optimizer(sgd, init_loss_scale=2**17, min_loss_scale=1.0)
    assert profiler.profile_all([1]).optimizer.name == "SGD"
    again = Profiler(model, get_batch, "cpu", out_folder=tmp_path, from_cache=True, add_to_existing=True)
    assert sizes_of(again.profile_all([1])) == [[1]] * 3


def test_a_size_without_memory_ends_the_sweep_and_larger_ones_are_not_tried(
    make_profiler: MakeProfiler, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """V24: out-of-memory sizes end a sweep cleanly; with memory they are measured later."""
    monkeypatch.setattr(ladders, "largest", 4)
    profile = make_profiler(Ladder(4, ticks=True)).profile_all([2, 4, 8, 16])
    assert sizes_of(profile) == [[2, 4]] * 3
    notes = dict(note.split(": ", 1) for note in profile.notes)
    assert "no room for 8 samples" in notes["micro-batch size 8"]
    assert notes["micro-batch size 16"] == "not tried, because 8 was too large"
    assert "micro-batch size 8 is left out" in capfd.readouterr().err
    monkeypatch.setattr(ladders, "largest", 8)
    profile = make_profiler(Ladder(4, ticks=True)).profile_all([8])
    assert sizes_of(profile) == [[2, 4, 8]] * 3
    assert not [note for note in profile.notes if note.startswith("micro-batch size 8")]


def test_no_size_that_fits_is_an_error(
    make_profiler: MakeProfiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ladders, "largest", 2)
    with pytest.raises(ValueError, match=r"no micro-batch size could be measured: .*no room for 4 samples"):
        make_profiler(Ladder(4, ticks=True)).profile_all([4, 8])
    with pytest.raises(FileNotFoundError, match="only an unfinished one"):
        read_profile(tmp_path)


def change_file(folder: Path, **changes: Any) -> None:
    found = msgspec.json.decode((folder / NAME).read_bytes())
    (folder / NAME).write_bytes(msgspec.json.encode({**found, **changes}))


def test_a_profile_of_another_model_device_or_precision_is_refused(
    make_profiler: MakeProfiler, tmp_path: Path
) -> None:
    make_profiler(Ladder(4)).profile_all([2])
    with pytest.raises(ValueError, match=rf"{NAME} holds the profile of another model: .*another out_folder"):
        make_profiler(Ladder(5)).profile_all([2])
    with pytest.raises(ValueError, match="another precision: expected bf16, found fp32"):
        make_profiler(Ladder(4), precision="bf16").profile_all([2])
    change_file(tmp_path, device="NVIDIA Abacus")
    with pytest.raises(ValueError, match=r"another device: expected cpu.*, found NVIDIA Abacus"):
        make_profiler(Ladder(4)).profile_all([2])
    change_file(tmp_path, version=7)
    with pytest.raises(ValueError, match=r"is not a valid Profile: .*version is 7, this library reads 1"):
        make_profiler(Ladder(4)).profile_all([2])


def test_an_unfinished_profile_of_another_model_is_refused_too(
    make_profiler: MakeProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladders, "largest", 1)
    with pytest.raises(ValueError, match="no micro-batch size"):
        make_profiler(Ladder(4, ticks=True)).profile_all([2])
    with pytest.raises(ValueError, match=rf"{UNFINISHED} holds the profile of another model"):
        make_profiler(Ladder(4)).profile_all([2])


@pytest.mark.parametrize("sizes", [[], [0], [-1], [1.5], ["2"], [True], 4, "12", None])
def test_invalid_sizes_are_refused(make_profiler: MakeProfiler, sizes: Any) -> None:
    with pytest.raises(ValueError, match="micro-batch sizes must be positive whole numbers"):
        make_profiler(Ladder(3)).profile_all(sizes)


def test_a_wrong_get_batch_is_refused(make_profiler: MakeProfiler) -> None:
    with pytest.raises(ValueError, match=r"get_batch\(2\) must return 2 samples, but returned 3 in 'x'"):
        make_profiler(Ladder(3), lambda size: get_batch(3)).profile_all([1])
    with pytest.raises(ValueError, match=r"get_batch\(4\) must return 4 samples, but returned 2 in 'x'"):
        make_profiler(Ladder(3), lambda size: get_batch(min(size, 2))).profile_all([4])
    with pytest.raises(TypeError, match=r"get_batch\(2\) must return a dict .*, not tuple"):
        make_profiler(Ladder(3), lambda size: tuple(get_batch(size).values())).profile_all([1])
    with pytest.raises(ValueError, match="get_batch is missing"):
        make_profiler(Ladder(3), None).profile_all([1])


def test_errors_of_the_model_and_the_arguments_are_raised(make_profiler: MakeProfiler) -> None:
    class NoLoss(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(CaptureError, match="expected its loss"):
        make_profiler(NoLoss()).profile_all([1])
    with pytest.raises(ValueError, match="precision must be one of"):
        make_profiler(Ladder(3), precision="fp8")
    with pytest.raises(ValueError, match="gpus_per_node must be a positive whole number"):
        make_profiler(Ladder(3), gpus_per_node=0)


@pytest.mark.parametrize("toy", ["GPT", "Conv"])
def test_models_with_ties_dropout_and_batch_norm(make_profiler: MakeProfiler, toy: str) -> None:
    options = {"dropout": 0.1} if toy == "GPT" else {}

    def batch(size: int) -> dict[str, object]:
        return make_inputs(toy, size, torch.Generator().manual_seed(1), torch.float32)

    profile = make_profiler(make_model(toy, **options), batch).profile_all([2, 3])
    assert len(profile.kinds) < len(profile.segments) or toy == "Conv"
    if toy == "GPT":
        (tie,) = profile.ties
        assert tie.segments == (0, len(profile.segments) - 1)
        assert tie.num_bytes == 4 * tie.num_elements


def test_half_precision(make_profiler: MakeProfiler) -> None:
    profile = make_profiler(Ladder(4), precision="bf16").profile_all([2])
    assert profile.precision == "bf16"
    assert {(cut.sent.size(1), cut.returned.size(1)) for cut in profile.cuts} == {(2 * WIDTH, 2 * WIDTH)}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.Adafactor])
def test_an_optimizer_is_made_again_with_its_options(kind: type[torch.optim.Optimizer]) -> None:
    """AdamW's defaults have an option that its constructor does not take."""
    optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.25, weight_decay=0.125)
    again = same_optimizer(optimizer)([nn.Parameter(torch.ones(3))])
    assert type(again) is kind
    assert again.defaults == optimizer.defaults
