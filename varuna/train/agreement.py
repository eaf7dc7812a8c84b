"""Operations on all ranks that all succeed, or raise the same error on all."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from varuna.errors import CheckpointError, StoreTaken
from varuna.execute.comm.collective import RankFailure
from varuna.execute.comm.session import Session
from varuna.types import place_in_map

Value = TypeVar("Value")


class Agreement:
    """The ranks of a job, as one of them sees them during a save or load."""

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self._session = session
        self.places = [place_in_map(session.stage_map, rank) for rank in ranks]
        """(stage, replica) of each rank, in the order of gathered values."""
        self.index = ranks.index(session.rank)
        self.first = ranks.index(session.stage_map[0][0])
        """The index of the first replica of the first stage, which writes manifests."""

    @property
    def is_first(self) -> bool:
        return self.index == self.first

    @property
    def description(self) -> str:
        return self._describe(self._session.rank)

    def run(self, act: Callable[[], Value], failure: str) -> list[Value]:
        """Return the results of all ranks. If any rank fails, all raise the same error with its reason."""

        def error(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
            kind = StoreTaken if all(one.kind == "StoreTaken" for one in failures) else CheckpointError
            reasons = [f"{self._describe(one.rank)}: {one.message}" for one in failures]
            return kind(f"{failure}: {'; '.join(reasons)}")

        return self._session.agree(act, error)

    def run_on_first(self, act: Callable[[], Value], failure: str) -> Value:
        """Run on the first rank only; return its result on all ranks."""
        found = self.run(lambda: act() if self.is_first else None, failure)[self.first]
        return found  # type: ignore[return-value]

    def run_locally(self, act: Callable[[], Value], failure: str) -> Value:
        """Return this rank's result, once all ranks have succeeded. Results are not exchanged."""
        results: list[Value] = []
        self.run(lambda: results.append(act()), failure)
        return results[0]

    def _describe(self, rank: int) -> str:
        stage, replica = place_in_map(self._session.stage_map, rank)
        return f"rank {rank} (stage {stage}, replica {replica})"
