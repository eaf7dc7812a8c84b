"""Decides if a wrapped model can enter the next generation of its job in place, and says why not."""

import logging
from typing import TYPE_CHECKING

import torch

from varuna.checkpoint.format.manifest import hash_of
from varuna.execute.rebuild.generation import owns_world
from varuna.execute.update.optimizers import parameter_lists, why_coupled
from varuna.morph.state import CodeIdentity

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

log = logging.getLogger("varuna")

TENSORS = (
    "step is given tensors, so the library cannot ask for another share of the batch (pass a function: "
    "model.step(fetch, order=order); or loop: for step, inputs in model.batches(fetch, order))"
)

REPLACED_INPUTS = (
    "step is given other tensors than model.batches yields, so the library cannot ask for another share of "
    "the batch (pass the inputs as they are: step moves them to the device; or change them inside the "
    "function: model.batches(lambda samples: change(fetch(samples)), order))"
)


def why_not_hot(model: "Varuna") -> str:
    """Return why this rank cannot morph in place; "" if it can."""
    options = model._options
    if not model._hot.fetches:
        return REPLACED_INPUTS if model._hot.replaces_inputs else TENSORS
    if model._optimizer is not None and (reason := why_coupled(model._optimizer)):
        return f"{reason}, so it needs one stage"
    if model._optimizer is not None and any(parameter_lists(model._optimizer)):
        return "a parameter group of the optimizer has a list with an entry for each parameter"
    if options.spans is not None or not isinstance(options.recompute, bool | None):
        return "the script sets spans or recompute for each stage of one layout"
    if len(model._copies):
        return "a copy of the model (copy.deepcopy, AveragedModel) holds the tensors of one stage"
    if len(open_models()) > 1:
        return "the script has wrapped several models"
    if not owns_world():
        return "the script calls init_process_group itself (leave it out: wrapping joins the job)"
    if model._programs.sampled.source.attributes.num_changes:
        return "the script has changed attributes of the model"
    if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in model._weights):
        return "a parameter has hooks"
    return ""


def report_if_hot(model: "Varuna") -> None:
    """Tell the manager whether this rank can morph in place. Cheap: it looks again every 16 steps."""
    known = model._hot.reported
    by_inputs = known in (TENSORS, REPLACED_INPUTS)
    if known is not None and by_inputs != model._hot.fetches and model._trainer.iteration % 16:
        return
    why_not = why_not_hot(model)
    if why_not == known:
        return
    if known is None:
        model._progress.runs(code_identity(model))
    if known is None and why_not and model._session.rank == model._session.ranks[0]:
        log.info("when machines change, this job restarts from a checkpoint: %s", why_not)
    model._hot.reported = why_not
    model._progress.hot(not why_not, why_not, replicated=not model._options.shard_optimizer)


def code_identity(model: "Varuna") -> CodeIdentity:
    """Return the versions, the user's code and the model of this worker."""
    import varuna  # it imports this module

    fingerprint = hash_of(model._programs.sampled.captured.graph.fingerprint.encode())
    return CodeIdentity(varuna.__version__, str(torch.__version__), model._hot.script, fingerprint)


def open_models() -> "list[Varuna]":
    """Return the wrapped models of this process that are not closed."""
    from varuna.train.varuna import models  # it imports this module

    return [model for model in models if not model._session.closed]
