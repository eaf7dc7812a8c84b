"""The whole model on one rank: the user's own class with the trained values."""

from torch import Tensor, nn

from varuna.capture.model.copies import uninitialized_copy
from varuna.capture.model.quantized import restore
from varuna.capture.model.source import Source
from varuna.capture.model.state import StageState
from varuna.capture.model.tied_weights import named_tensors
from varuna.errors import CaptureError, list_some
from varuna.execute.comm.session import Session


def gather_model(session: Session, source: Source, state: StageState, rank: int) -> nn.Module | None:
    """Return the whole model on the CPU of `rank`, and None on all others. All ranks call it.

    Stages send one after the other, so that other ranks need memory for one stage only.
    """
    if rank not in session.ranks:
        raise ValueError(f"gather_model to rank {rank}: the job has ranks 0 to {len(session.ranks) - 1}")
    values: dict[str, Tensor] = {}
    for row in session.stage_map:
        sends = session.rank == row[0]
        own = {name: tensor.detach().cpu() for name, tensor in state.by_name().items()} if sends else {}
        sent = session.broadcast(own, row[0], dict[str, Tensor])
        if session.rank == rank:
            values = {**sent, **values}
    if session.rank != rank:
        return None
    model = uninitialized_copy(source.meta_model)
    for name, module in model.named_modules():
        module.training = source.training_flags[name]
    missing = []
    for name, tensor in named_tensors(model).items():
        found = values.get(source.canonical.get(name, name))
        if found is None:
            try:
                found = source.value(name)
            except CaptureError:
                missing.append(name)
                continue
        if found.device.type == "meta":
            missing.append(name)
        else:
            tensor.data.copy_(found)
    if missing:
        raise CaptureError(
            f"no stage uses {list_some(missing)}, and the model that had these values is freed or on `meta` "
            "(keep the original model, or load full_state_dict() into a model of your own)"
        )
    restore(model)
    return model
