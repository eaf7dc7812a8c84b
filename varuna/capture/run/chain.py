"""A span of segments as a chain of programs, in which equal segments share one program.

A compiler that gets a whole stage compiles each of its equal blocks again. In a chain it compiles one of
each kind, which runs with the state and the random numbers of each segment in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, fx, nn

from varuna.capture.cuts.segment_kinds import find_kinds, ordinal_index
from varuna.capture.graph.loss_totals import TotalsProgram
from varuna.capture.model.source import Source
from varuna.capture.run.captured import Captured
from varuna.capture.run.program import SpanProgram
from varuna.types import TensorSpec, Work

UNCOMPILED_SHARE = 0.05  # largest share of a chain's operations that is not compiled


class ProgramLink(NamedTuple):
    program: SpanProgram  # of the first segment of this kind
    places: tuple[int, ...]  # indices of its state in the chain's state
    first_ordinal: int  # number of its first random operation


@dataclass(frozen=True)
class ProgramChain:
    """Several programs with the interface of one `SpanProgram`."""

    links: tuple[ProgramLink, ...]
    state: tuple[str, ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    mutated: tuple[str, ...]

    @property
    def leaves(self) -> Mapping[str, nn.Module]:
        return {name: leaf for link in self.links for name, leaf in link.program.leaves.items()}

    @property
    def totals(self) -> TotalsProgram | None:
        return next((link.program.totals for link in self.links if link.program.totals), None)

    @property
    def repeats(self) -> bool:
        return all(link.program.repeats for link in self.links)

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        values = tuple(received)
        for program, places, first_ordinal in self.links:
            own = msgspec.structs.replace(work, first_ordinal=first_ordinal) if program.random else work
            values = program([state[place] for place in places], values, inputs, own)
        return values

    def with_specs(self, received: tuple[TensorSpec, ...], sent: tuple[TensorSpec, ...]) -> ProgramChain:
        """Return the same computation for values of other sizes."""
        return replace(self, received=received, sent=sent)

    def compiled(self) -> ProgramChain:
        """Return the chain with its programs compiled at their first run, except those not worth it."""
        programs = {id(link.program): link.program for link in self.links}
        skipped = self._not_worth_compiling(programs)
        made = {key: program if key in skipped else program.compiled() for key, program in programs.items()}
        links = [link._replace(program=made[id(link.program)]) for link in self.links]
        return replace(self, links=tuple(links))

    def _not_worth_compiling(self, programs: Mapping[int, SpanProgram]) -> set[int]:
        """Return ids of small programs before the loss that run once: each compiles as long as a block."""
        times = Counter(id(link.program) for link in self.links)
        sizes = {
            key: sum(node.op == "call_function" for node in program.graph_module.graph.nodes)
            for key, program in programs.items()
        }
        left = UNCOMPILED_SHARE * sum(times[key] * size for key, size in sizes.items())
        found = set()
        for key, size in sorted(sizes.items(), key=lambda item: item[1]):
            if times[key] == 1 and programs[key].sent and size <= left:
                found.add(key)
                left -= size
        return found


def chain_of(source: Source, captured: Captured, first: int, stop: int, device: torch.device) -> ProgramChain:
    kinds = find_kinds(source, captured)
    programs = [captured.carve(index, index + 1) for index in range(first, stop)]
    state = tuple(dict.fromkeys(chain.from_iterable(program.state for program in programs)))
    place_of = {name: place for place, name in enumerate(state)}
    shared: dict[int, SpanProgram] = {}
    links = []
    for kind, program in zip(kinds[first:stop], programs, strict=True):
        ordinals = [int(str(node.args[place])) for node, place in _ordinals(program)]
        # An opaque module numbers its own draws, and equals no other segment.
        start = 0 if program.leaves else min(ordinals, default=0)
        if kind not in shared:
            shared[kind] = _numbered_from_zero(program.to(device), start)
        links.append(ProgramLink(shared[kind], tuple(place_of[name] for name in program.state), start))
    return ProgramChain(
        tuple(links),
        state,
        programs[0].received,
        programs[-1].sent,
        tuple(name for program in programs for name in program.mutated),
    )


def _ordinals(program: SpanProgram) -> list[tuple[fx.Node, int]]:
    """Return the random nodes, each with the index of the argument that holds its ordinal."""
    places = ((node, ordinal_index(node)) for node in program.graph_module.graph.nodes)
    return [(node, place) for node, place in places if place is not None]


def _numbered_from_zero(program: SpanProgram, start: int) -> SpanProgram:
    """Subtract `start` from the ordinals of a program, in place."""
    for node, place in _ordinals(program) if start else ():
        args = list(node.args)
        args[place] = int(str(args[place])) - start
        node.args = tuple(args)
    program.graph_module.recompile()
    return program
