"""The measurement driver: who measures what, how a sweep ends, and how results of ranks are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.measure.profiles import size_cost, subject
from varuna.errors import WorkerError
from varuna.execute.comm.collective import Collective, RankFailure
from varuna.measure.draft import ProfileDraft, new_draft
from varuna.plan.profile_file import UNFINISHED
from varuna.profile import driver as module
from varuna.profile.draft_file import DraftFile
from varuna.profile.driver import CompleteSizes, MeasurementDriver, SizeResult, merge_results
from varuna.profile.ranks import RankPlace, RankPlaces, on_all, on_first
from varuna.profile.report import ProfileReport
from varuna.profile.timing import RankResult, SizeBatch
from varuna.types import Overheads

CPU = torch.device("cpu")
OVERHEADS = Overheads(1e-5, 1e-4)


class ListReport(ProfileReport):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text.rsplit(" in ", 1)[0])  # without the time


class FakeBench:
    """Measures sizes up to a limit; larger ones run out of memory."""

    def __init__(self, largest: int = 1 << 30, error: Exception | None = None) -> None:
        self.largest = largest
        self.error = error
        self.calls: list[str] = []
        self.num_freed = 0

    def measure_chain(self, batch: SizeBatch, num_kinds: int, *, with_overheads: bool) -> RankResult:
        self.calls.append(f"chain {batch.size}" + (" with overheads" if with_overheads else ""))
        self._fail(batch.size)
        costs = {kind: size_cost(batch.size, kind + 1.0) for kind in range(num_kinds)}
        return RankResult(costs, OVERHEADS if with_overheads else None, {})

    def measure_separately(
        self,
        batch: SizeBatch,
        kinds: Sequence[int],
        *,
        with_overheads: bool,
        refuse: Callable[[int], str | None],
        all_or_nothing: bool,
    ) -> RankResult:
        self.calls.append(f"separately {batch.size} {list(kinds)}")
        left_out = {kind: why for kind in kinds if (why := refuse(kind)) is not None}
        costs = {kind: size_cost(batch.size) for kind in kinds if kind not in left_out}
        return RankResult(costs, None, left_out)

    def _fail(self, size: int) -> None:
        if self.error is not None:
            raise self.error
        if size > self.largest:
            raise torch.OutOfMemoryError(f"no memory for {size} samples")

    def free(self) -> None:
        self.num_freed += 1


def make_driver(
    folder: Path | None = None,
    *,
    draft: ProfileDraft | None = None,
    rank: int = 0,
    places: Sequence[tuple[str, str]] = (("here", "cpu"),),
    device: torch.device = CPU,
) -> tuple[MeasurementDriver, ListReport]:
    report = ListReport()
    found = RankPlaces([RankPlace(machine, where, 8) for machine, where in places])
    file = DraftFile(draft or new_draft(subject()), folder)
    source: Any = None
    return MeasurementDriver(Collective(rank, [rank]), found, source, device, file, report), report


def batch(size: int) -> SizeBatch:
    captured: Any = None
    return SizeBatch(size, captured, {})


def sweep(driver: MeasurementDriver, sizes: list[int], bench: FakeBench, **options: Any) -> None:
    policy = CompleteSizes(sizes, CPU, 1)
    driver.sweep(sizes, batch, bench, options.get("policy", policy))  # type: ignore[arg-type]


def notes_of(draft: ProfileDraft) -> dict[str, str]:
    return {note.about: note.why for note in draft.notes}


def test_a_sweep_measures_every_size_and_the_overheads_once(tmp_path: Path) -> None:
    driver, report = make_driver(tmp_path)
    bench = FakeBench()
    sweep(driver, [1, 2, 4], bench)
    assert bench.calls == ["chain 1 with overheads", "chain 2", "chain 4"]
    assert driver.file.draft.measured_sizes() == [1, 2, 4]
    assert driver.file.draft.overheads == OVERHEADS
    assert report.lines == [f"profiled micro-batch size {size}" for size in (1, 2, 4)]


def test_every_size_is_written_before_the_next_one_starts(tmp_path: Path) -> None:
    driver, _ = make_driver(tmp_path)
    written: list[int] = []

    def counting(size: int) -> SizeBatch:
        file = tmp_path / UNFINISHED
        written.append(file.read_text().count("microbatch_size") if file.exists() else 0)
        return batch(size)

    driver.sweep([1, 2, 4], counting, FakeBench(), CompleteSizes([1, 2, 4], CPU, 1))  # type: ignore[arg-type]
    assert written == [0, 2, 4], "two kinds more with every size"


def test_a_size_that_does_not_fit_ends_the_sweep_and_is_noted() -> None:
    driver, report = make_driver()
    bench = FakeBench(largest=2)
    sweep(driver, [1, 2, 4, 8, 16], bench)
    assert bench.calls[-1] == "chain 4" and bench.num_freed == 1
    assert driver.file.draft.measured_sizes() == [1, 2]
    assert notes_of(driver.file.draft) == {
        "micro-batch size 4": "out of memory (no memory for 4 samples)",
        "micro-batch size 8": "not tried, because 4 was too large",
        "micro-batch size 16": "not tried, because 4 was too large",
    }
    assert report.lines[-1] == (
        "micro-batch size 4 is left out: out of memory (no memory for 4 samples); 8, 16 not tried"
    )


def test_a_size_that_fits_later_loses_its_note() -> None:
    driver, _ = make_driver()
    sweep(driver, [1, 4], FakeBench(largest=2))
    assert "micro-batch size 4" in notes_of(driver.file.draft)
    sweep(driver, [4], FakeBench())
    assert driver.file.draft.measured_sizes() == [1, 4] and not driver.file.draft.notes


def test_an_error_that_is_not_about_memory_is_raised() -> None:
    driver, _ = make_driver()
    with pytest.raises(ZeroDivisionError, match="a bug of the model"):
        sweep(driver, [1], FakeBench(error=ZeroDivisionError("a bug of the model")))
    assert driver.file.draft == new_draft(subject())


def test_a_size_is_not_tried_if_smaller_ones_predict_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two kinds hold 1000 bytes for each sample in each of two micro-batches; one works on 500 more.
    monkeypatch.setattr(module, "available_bytes", lambda _: (2 * 2 * 1000 + 500) * 4 - 1)
    driver, _ = make_driver()
    bench = FakeBench()
    sweep(driver, [2, 4, 8], bench)
    assert bench.calls == ["chain 2 with overheads"]
    assert driver.file.draft.measured_sizes() == [2]
    assert notes_of(driver.file.draft)["micro-batch size 4"].startswith("out of memory (it needs about")


@pytest.mark.parametrize(
    ("size", "ranks", "fits"), [(4, 1, True), (9, 1, True), (10, 1, False), (4, 2, True), (5, 2, False)]
)
def test_the_memory_that_a_size_needs_grows_with_size_and_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, ranks: int, fits: bool
) -> None:
    draft = new_draft(subject()).with_sizes({0: size_cost(1), 1: size_cost(1)})
    # Activations of both kinds for two micro-batches in flight, and the larger working memory: 4500 bytes.
    monkeypatch.setattr(module, "available_bytes", lambda _: 9 * 4500)
    why = CompleteSizes([size], CPU, ranks).refuse_size(size, draft)
    assert (why is None) == fits


def test_without_a_known_size_or_known_memory_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda _: 1)
    assert CompleteSizes([8], CPU, 1).refuse_size(8, new_draft(subject())) is None
    monkeypatch.setattr(module, "available_bytes", lambda _: None)
    draft = new_draft(subject()).with_sizes({0: size_cost(1), 1: size_cost(1)})
    assert CompleteSizes([8], CPU, 1).refuse_size(1 << 40, draft) is None


class PartialPolicy:
    """Keeps what could be measured, like the policy of pyrannc."""

    all_or_nothing = False

    def __init__(self, refused: dict[int, str], chain: bool = False) -> None:
        self.refused = refused
        self.chain = chain
        self.results: list[SizeResult] = []

    def refuse_size(self, size: int, draft: ProfileDraft) -> str | None:
        return None

    def allows_chain(self, size: int) -> bool:
        return self.chain

    def refuse_kind(self, kind: int, size: int, draft: ProfileDraft) -> str | None:
        return self.refused.get(kind)

    def record(self, draft: ProfileDraft, size: int, result: SizeResult) -> tuple[ProfileDraft, str | None]:
        self.results.append(result)
        return draft.with_sizes(result.costs), None


def test_a_policy_may_keep_the_kinds_that_could_be_measured() -> None:
    driver, _ = make_driver()
    policy = PartialPolicy({1: "no time"})
    sweep(driver, [2], FakeBench(), policy=policy)
    assert [len(costs) for costs in driver.file.draft.sizes] == [1, 0]
    assert policy.results[0].left_out == {1: "no time"} and policy.results[0].elapsed >= 0


def test_a_chain_that_fails_is_measured_separately_if_the_policy_keeps_parts() -> None:
    driver, _ = make_driver()
    bench = FakeBench(error=ZeroDivisionError("in the chain"))
    sweep(driver, [2], bench, policy=PartialPolicy({}, chain=True))
    assert bench.calls == ["chain 2 with overheads", "separately 2 [0, 1]"] and bench.num_freed == 1
    assert driver.file.draft.measured_sizes() == [2]


# ---------------------------------------------------------------- several ranks


def test_ranks_with_their_own_gpus_share_the_kinds_evenly_by_bytes() -> None:
    gpus = [("a", "cuda:0"), ("a", "cuda:1"), ("a", "cuda:1")]
    weights = [100, 900, 500, 300]
    own = [
        make_driver(rank=rank, places=gpus, device=torch.device("cuda"))[0].own_kinds(weights)
        for rank in range(3)
    ]
    assert sorted(own[0] + own[1]) == [0, 1, 2, 3] and own[2] == [], "the third has no GPU of its own"
    assert {sum(weights[kind] for kind in kinds) for kinds in own[:2]} == {900}


def test_ranks_on_cores_measure_all_kinds_at_once() -> None:
    for rank in range(2):
        driver, _ = make_driver(rank=rank, places=[("a", "cpu")] * 2)
        assert driver.own_kinds([1, 2, 3]) == [0, 1, 2]


def result(costs: dict[int, float], left_out: dict[int, str] | None = None) -> RankResult:
    return RankResult({kind: size_cost(2, seconds) for kind, seconds in costs.items()}, None, left_out or {})


def test_costs_of_ranks_are_merged_by_kind() -> None:
    gathered = [
        (result({0: 1.0, 1: 4.0}), 2.0),
        (None, 9.0),
        (result({0: 3.0}), 1.0),
        (result({0: 9.0}), 1.0),
    ]
    merged = merge_results(gathered, all_or_nothing=True)
    assert merged.costs[0].forward.seconds == 3.0 * 2 and merged.costs[1].forward.seconds == 4.0 * 2
    assert merged.elapsed == 9.0 and merged.left_out == {} and merged.overheads is None


def test_the_overheads_of_the_first_rank_that_measured_them_count() -> None:
    second = RankResult({}, OVERHEADS, {})
    assert merge_results([(result({}), 0.0), (second, 0.0)], all_or_nothing=False).overheads == OVERHEADS


def test_a_kind_that_one_rank_left_out_counts_as_measured_unless_all_must_fit() -> None:
    gathered = [(result({0: 1.0}), 0.0), (result({}, {0: "no memory", 1: "no time"}), 0.0)]
    assert merge_results(gathered, all_or_nothing=False).left_out == {1: "no time"}
    assert merge_results(gathered, all_or_nothing=True).left_out == {0: "no memory", 1: "no time"}


class TwoRanks(Collective):
    """Rank 0, beside a rank 1 that answers as given."""

    def __init__(self, other: Any) -> None:
        super().__init__(0, [0, 1])
        self.other = other

    def gather(self, value: Any, kind: Any) -> list[Any]:
        return [value, self.other]


def test_an_error_of_another_rank_names_it() -> None:
    failed = TwoRanks((None, RankFailure(1, "KeyError", "'x'")))
    with pytest.raises(WorkerError, match="rank 1 failed while profiling: KeyError: 'x'"):
        on_all(failed, lambda: 5, int)
    assert on_all(TwoRanks((7, None)), lambda: 5, int) == [5, 7]


def test_an_own_error_is_raised_as_it_is() -> None:
    def fail() -> int:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        on_all(TwoRanks((7, None)), fail, int)


def test_work_of_the_first_rank_is_known_to_all() -> None:
    assert on_first(TwoRanks((None, None)), lambda: "found", str) == "found"
