"""Builds the trainer of one rank from its stage, its links and its reductions."""

from collections.abc import Callable

import torch

from varuna.capture import Captured, StageState
from varuna.execute.comm.groups import have_equal_widths, stages_of_ties
from varuna.execute.comm.session import Session, make_tie_groups
from varuna.execute.step.cuda_graphs import GraphedStage, make_recorders
from varuna.execute.step.engine import Engine
from varuna.execute.step.nonfinite import NonFiniteLosses
from varuna.execute.step.scatter import WeightFunction
from varuna.execute.step.stage import Stage
from varuna.execute.step.trainer import Programs, Trainer
from varuna.execute.update.clipping import ModelNorm
from varuna.execute.update.reduce import Reducer, TiedParameter
from varuna.types import Op, Plan


def assemble(
    plan: Plan,
    session: Session,
    captured: Captured,
    state: StageState,
    programs: Programs,
    *,
    device: torch.device,
    seed: int,
    timeout_seconds: float,
    split_backward: bool = True,
    cuda_graphs: bool = False,
    weigh: WeightFunction | None = None,
    delay: Callable[[Op, int], float] | None = None,
    has_request: Callable[[], bool] = lambda: False,
    first_run_patience: float = 1.0,
) -> Trainer:
    own = plan.stages[session.stage]
    recorders = make_recorders(device) if cuda_graphs else None
    graphed = None if recorders is None else GraphedStage(state, recorders, device)
    engine = Engine(
        graphed or Stage(state, split_backward=split_backward),
        index=session.stage,
        stages=plan.depth,
        upstream=session.adjacent_stage(-1),
        downstream=session.adjacent_stage(+1),
        waiter=session.waiter,
        device=device,
        poll=session.network.poll if session.network is not None else lambda: None,
        delay=delay,
    )
    program = captured.carve(own.first, own.stop)
    # A weight that the model never uses has no gradient, as in one process.
    used = {state.tensor(name) for name in program.state}
    reducer = Reducer(
        weights=[p for p in state.parameters() if p in used and (p.is_floating_point() or p.is_complex())],
        replicas=session.replicas,
        everyone=session.group if plan.depth > 1 else None,
        counts_norm=session.replica == 0,
        waiter=session.waiter,
        ties=[] if session.provisional else _tied_parameters(plan, session, captured, state, timeout_seconds),
        overlaps=not program.leaves,
        has_request=has_request,
        fixed_gradients=graphed.gradients if graphed is not None else frozenset(),
    )
    return Trainer(
        plan=plan,
        session=session,
        engine=engine,
        reducer=reducer,
        state=state,
        traits=captured,
        programs=programs,
        mutated=program.mutated,
        seed=seed,
        losses=NonFiniteLosses(session),
        weigh=weigh,
        first_run_patience=first_run_patience,
        norm=ModelNorm(session, reducer, state.parameters()),
    )


def _tied_parameters(
    plan: Plan, session: Session, captured: Captured, state: StageState, timeout_seconds: float
) -> list[TiedParameter]:
    """Return this stage's parameters that other stages hold, too. All ranks call this."""
    holders: dict[str, list[int]] = {}
    for segment in captured.graph.segments:
        for name in segment.parameters:
            holders.setdefault(name, []).append(segment.index)
    ties = stages_of_ties(plan, holders)
    groups = make_tie_groups(session, ties.values(), timeout_seconds=timeout_seconds)
    # The loss does not depend on them, or only an opaque module knows whether it does.
    doubtful = captured.untouched() | captured.held_by_leaves
    return [
        TiedParameter(
            state.tensor(name),
            groups[stages],
            counts_here=session.stage == stages[0],
            num_stages=len(stages),
            is_summed=session.replica == 0 or have_equal_widths(session.stage_map, stages),
            may_lack=name in doubtful,
        )
        for name, stages in ties.items()
        if session.stage in stages
    ]
