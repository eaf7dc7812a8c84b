"""A script as users start it: `python -m tests.pyrannc.launched_script FOLDER WHAT STAGES`."""

import os
import signal
import sys
from pathlib import Path

import torch

import pyrannc
from pyrannc.process import join
from tests.pyrannc.jobs import batch_of, make, train

COUNTS = [[3, 2, 2, 1], [2, 2, 2, 2], [0, 4, 1, 2]]


def main(folder: Path, what: str, stages: int) -> None:
    if what == "train":
        join()
        del os.environ["MASTER_ADDR"]  # as where a script has made its group by an `init_method`
        found = train("WithLoss", counts=COUNTS, options={"partition_num": stages, "pipeline_num": 2})
        torch.save({"rank": pyrannc.get_rank(), **found}, folder / f"{pyrannc.get_rank()}.pt")
        return
    model = pyrannc.RaNNCModule(make("Simple"), device="cpu", partition_num=stages, pipeline_num=2)
    for step in range(3):
        (x,), _ = batch_of("Simple", step, 4)
        if step == 2 and pyrannc.get_rank() == 1:
            if what == "raise":
                raise ZeroDivisionError("the samples of this rank are bad")
            model._require_partitioned("").pipeline.trainer.engine.delay = die_in_the_midst
        try:
            model(x).square().mean().backward()
        except pyrannc.RankLost as error:
            report_later_calls(model, x, error)
            raise


def report_later_calls(model: pyrannc.RaNNCModule, x: torch.Tensor, first: pyrannc.RankLost) -> None:
    """Write to stderr which calls after a loss raise the same error."""
    calls = {"forward": lambda: model(x), "state_dict": model.state_dict}
    for name, call in calls.items():
        try:
            call()
        except pyrannc.RankLost as error:
            print(f"{name}: {'again' if str(error) == str(first) else error}", file=sys.stderr)


def die_in_the_midst(_op: str, microbatch: int) -> float:
    if microbatch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
