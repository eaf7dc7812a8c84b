"""The function `varuna.verify`: does this model train as in one plain process, at every layout?"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
import torch
from torch import nn

from varuna.capture.run.verify import FP64_PARAMETERS
from varuna.errors import CaptureError, VarunaError, check_name
from varuna.types import PrecisionName
from varuna.verification.children import Answer, Channel, Child, ChildError
from varuna.verification.coordinator import Coordinator, VerifyRequest
from varuna.verification.layouts import VerifyLayout, parse_layout, parse_layouts
from varuna.verification.plain_runs import PlainFailed
from varuna.verification.report import Verification
from varuna.verification.subject import OptimizerChoice, VerifySubject, make_subject
from varuna.verification.wrapped import FACES, Face

PATIENCE = 20
"""A part of the work, such as the capture, takes at most so many times `timeout_seconds`."""
ShowProgress = Callable[[int, int, str], None]
"""Called with the number of finished parts, the number of all, and what runs now."""


def verify(
    model: nn.Module,
    sample: object = None,
    *,
    optimizer: OptimizerChoice | None = None,
    make_batch: Callable[[int], object] | None = None,
    layouts: str | Sequence[str | VerifyLayout] | None = None,
    steps: int = 3,
    batch_size: int | None = None,
    face: Face = "varuna",
    precision: PrecisionName | str | None = None,
    timeout_seconds: float = 120.0,
    progress: ShowProgress | None = None,
    **options: Any,
) -> Verification:
    """Train a model in one plain process and at several layouts, and compare all numbers.

        report = varuna.verify(model, {"x": x, "y": y}, layouts="2x1,1x2")
        print(report)
        assert report.is_equal

    `sample` has the inputs of a few samples, by the names of forward's arguments, or makes them: a function
    of the number of samples. `make_batch(step)` returns the whole batch of a step. `optimizer` is one of the
    model's parameters, or a function that makes one; the default is AdamW. `layouts` None chooses them.
    `precision` None compares in fp64 if the model runs in it, where rounding is small. `options` are
    `batch_dims`, `dynamic_dims`, `loss`, `loss_weight` and `shared_weights` of `Varuna`. The model stays as
    it is: all runs are in forked processes, on the CPU.
    """
    made = {"model": model, "sample": sample, "optimizer": optimizer, "make_batch": make_batch, **options}
    return verify_made(
        made,
        layouts=layouts,
        steps=steps,
        batch_size=batch_size,
        face=face,
        precision=precision,
        timeout_seconds=timeout_seconds,
        progress=progress,
    )


def verify_made(
    made: Mapping[str, Any],
    *,
    layouts: str | Sequence[str | VerifyLayout] | None = None,
    steps: int = 3,
    batch_size: int | None = None,
    face: Face = "varuna",
    precision: str | None = None,
    timeout_seconds: float = 120.0,
    progress: ShowProgress | None = None,
) -> Verification:
    """Verify what the user's `make` returned, by name."""
    check_name("face", face, FACES)
    if precision is not None:
        check_name("precision", precision, ("fp64", *get_args(PrecisionName)))
    for name, value in (("steps", steps), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    if not 0 < timeout_seconds < 1e6:
        raise ValueError(f"timeout_seconds must be above 0, not {timeout_seconds:g}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "CUDA is initialized in this process, and forked processes cannot use it (call varuna.verify "
            "before the first use of the GPU, or run `varuna verify SCRIPT:FUNCTION`)"
        )
    chosen = read_layouts(layouts)
    subject = make_subject(made, steps=steps, batch_size=batch_size)
    small = sum(p.numel() for p in subject.model.parameters()) <= FP64_PARAMETERS
    attempts = [True, False] if precision is None and small else [precision == "fp64"]
    trained: Any = precision if precision in get_args(PrecisionName) else "fp32"
    show = progress or (lambda *_: None)
    for number, wide in enumerate(attempts):
        request = VerifyRequest(chosen, face, trained, wide, timeout_seconds)
        answer = _coordinate(subject, request, show)
        last = number == len(attempts) - 1
        if answer.error is not None:
            if last:
                raise VarunaError(_explain(answer))
            continue
        found = msgspec.msgpack.decode(answer.value, type=Verification)
        # In fp64, a model may be refused for a dtype that its code fixes. A mask of the least number of fp64
        # is infinite in fp32.
        if last or found.status == "equal" or (found.status == "differs" and not found.is_infinite):
            return found
    raise AssertionError("the last attempt returns or raises")


def read_layouts(layouts: str | Sequence[str | VerifyLayout] | None) -> tuple[VerifyLayout, ...] | None:
    if layouts is None:
        return None
    if isinstance(layouts, str):
        return parse_layouts(layouts)
    found = tuple(one if isinstance(one, VerifyLayout) else parse_layout(one) for one in layouts)
    return found or parse_layouts("")


def _explain(answer: Answer) -> str:
    assert answer.error is not None
    if answer.error.kind == PlainFailed.__name__:
        kind, _, text = answer.error.text.partition(": ")
        if kind == CaptureError.__name__:  # no loss is among the outputs
            return text
        return f"the model does not train in one plain process, without Varuna: {answer.error.text}"
    return f"{answer.error.kind}: {answer.error.text}"


def _coordinate(subject: VerifySubject, request: VerifyRequest, show: ShowProgress) -> Answer:
    """Verify in a forked process, so that this one stays as it is; pass its progress on."""

    def task(channel: Channel) -> bytes:
        def progress(done: int, total: int, what: str) -> None:
            channel.send(msgspec.msgpack.encode((done, total, what)))

        return msgspec.msgpack.encode(Coordinator(subject, request, progress).run())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads, which the child avoids
        child = Child(task)
    answer: Answer | None = None
    limit, part = PATIENCE * request.timeout_seconds, "starting"
    child.channel.socket.settimeout(limit)
    try:
        while answer is None:
            message = child.channel.receive()
            note = msgspec.msgpack.decode(message)
            if isinstance(note, dict):
                answer = child.answer(message)
            else:
                part = note[-1]
                show(*note)
    except TimeoutError:
        answer = Answer(error=ChildError("Timeout", f"{part} takes more than {limit:.0f} s (see --timeout)"))
    except EOFError:
        pass
    finally:
        end = child.end()
    return answer or Answer(error=end)
