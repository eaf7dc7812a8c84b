"""The blame goes to the worker that failed first, whoever was noticed first."""

import signal

import pytest

from varuna.morph.failures import (
    ErrorFile,
    ErrorMessage,
    ExtraInfo,
    WorkerFailure,
    describe_failure,
    find_cause,
)
from varuna.plan.search.choose import lay_out

LAYOUT = lay_out(4, 2, batch_size=4, microbatch_size=1)
QUOTE = ("varuna.errors.PeerLost", "varuna.errors.WorkerError", "builtins.RuntimeError")


def raised(rank: int, *, at: float, kinds: tuple[str, ...] = ("builtins.ValueError",)) -> WorkerFailure:
    message = f"{kinds[0].split('.')[-1]}: of rank {rank}"
    info = ExtraInfo(py_callstack=f"Traceback of {rank}", timestamp="0", kinds=kinds, seconds=at)
    return WorkerFailure(rank, 1, ErrorFile(ErrorMessage(message, info)))


def ended(rank: int, code: int) -> WorkerFailure:
    return WorkerFailure(rank, code, None)


@pytest.mark.parametrize(
    "failures",
    [
        [raised(2, at=5.0), raised(0, at=6.0)],
        [raised(0, at=1.0, kinds=QUOTE), raised(2, at=5.0)],
        [raised(0, at=1.0, kinds=QUOTE), ended(2, -signal.SIGABRT)],
        [raised(0, at=1.0), ended(2, -signal.SIGKILL)],
        [ended(0, -signal.SIGABRT), raised(2, at=5.0)],
        [raised(0, at=6.0, kinds=QUOTE), raised(2, at=5.0, kinds=QUOTE)],
    ],
    ids=[
        "the earliest exception",
        "not one that quotes another",
        "a crash before a quotation",
        "a killed process before those that lost it",
        "an exception before an abort that may follow from it",
        "quotations alone: the earliest",
    ],
)
def test_the_cause_is_the_failure_that_caused_the_others(failures: list[WorkerFailure]) -> None:
    """V33"""
    assert find_cause(failures).rank == 2
    assert find_cause(failures[::-1]).rank == 2


def test_an_error_file_of_torch_elastic_is_read() -> None:
    info = ExtraInfo(py_callstack="", timestamp="17")
    quoted = ErrorFile(ErrorMessage("PeerHangs: rank 1", info))
    assert (quoted.seconds, quoted.quotes_another) == (17.0, True)
    assert not ErrorFile(ErrorMessage("ValueError: WorkerError", info)).quotes_another


def test_the_message_names_rank_stage_and_original_traceback() -> None:
    """V33"""
    assert describe_failure(raised(3, at=1.0), LAYOUT) == (
        "rank 3 (stage 1, replica 1) raised ValueError: of rank 3\n\nTraceback of 3"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "was killed by SIGKILL"), (3, "exited with code 3"), (-40, "was killed by signal 40")],
)
def test_a_failure_without_an_exception_quotes_the_log(code: int, words: str) -> None:
    """V33"""
    told = describe_failure(ended(0, code), LAYOUT, last_lines="out of memory\n")
    assert told.startswith(f"rank 0 (stage 0, replica 0) {words}")
    assert told.endswith("last lines of its stderr:\n\nout of memory")
