"""Counts the false alarms of `varuna.verify` on the models of the zoo, and measures its time.

python -m benchmarks.verify                       a small GPT-2: seconds of verify
python -m benchmarks.verify --zoo [name ...]      one line per model: equal, differs, refused, failed
python -m benchmarks.verify --zoo --skip 40 --seconds 280
"""

import argparse
import inspect
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from tests.zoo.tours import cases
from tests.zoo.trial import Case, default_dtype, made_plain
from varuna.verification.report import Verification
from varuna.verification.verify import verify

LAYOUTS = "2x2:chunk=2"
WITHOUT_CUTS = "1x2"
"""For models that cannot be cut."""

BATCH = 7
"""No model of the zoo has a dimension of this size."""


def verify_case(case: Case, layouts: str = LAYOUTS) -> Verification:
    """Verify a model of the zoo as `pyrannc` wraps it: with any arguments, and a loss of its outputs."""
    with default_dtype(case.dtype):
        model = made_plain(case)
        names = inspect.signature(model.forward)

        def make_batch(step: int) -> dict[str, Any]:
            torch.manual_seed(0)
            args, kwargs = case.inputs(BATCH, torch.Generator().manual_seed(100 + step))
            return dict(names.bind(*args, **kwargs).arguments)

        if case.by_microbatch:
            layouts = f"{2 if layouts == LAYOUTS else 1}x1:chunk={BATCH}"
        return verify(
            model,
            make_batch=make_batch,
            loss=case.loss,
            layouts=layouts,
            face="pyrannc",
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4),
            **case.options,
        )


def tour(wanted: Sequence[str], *, skip: int, seconds: float) -> Counter[str]:
    """Verify models one after another; start none after `seconds`."""
    began, found = time.monotonic(), Counter[str]()
    for number, (name, case) in enumerate(cases(list(wanted)).items()):
        if number < skip:
            continue
        if time.monotonic() - began > seconds:
            print(f"stopped before model {number}", flush=True)
            break
        start = time.monotonic()
        try:
            report = verify_case(case)
            if "can be cut into" in report.verdict:
                report = verify_case(case, WITHOUT_CUTS)
            status, said = report.status, report.verdict
            if report.status == "differs" and report.layouts:
                said = "; ".join(f"{r.layout}: {r.first}" for r in report.layouts if r.first is not None)
        except Exception as error:
            status, said = "failed", f"{type(error).__name__}: {error}"
        found[status] += 1
        print(f"{number} {name}: {status}: {said[:400]}   [{time.monotonic() - start:.1f} s]", flush=True)
    return found


def time_of_gpt2() -> None:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 32}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    ids = torch.randint(0, 256, (8, 32))
    for layouts in ("2x1", None):
        start = time.monotonic()
        report = verify(model, {"input_ids": ids, "labels": ids}, layouts=layouts)
        print(f"{len(report.layouts)} layouts: {report.status}, {time.monotonic() - start:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify")
    parser.add_argument("names", nargs="*", help="parts of the names of models")
    parser.add_argument("--zoo", action="store_true", help="verify the models of the zoo")
    parser.add_argument("--skip", type=int, default=0, help="number of models to leave out at the beginning")
    parser.add_argument("--seconds", type=float, default=280.0, help="start no model after this time")
    options = parser.parse_args()
    if options.zoo:
        print(dict(tour([n.lower() for n in options.names], skip=options.skip, seconds=options.seconds)))
    else:
        time_of_gpt2()


if __name__ == "__main__":
    main()
