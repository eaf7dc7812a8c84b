"""A span of segments as a chain of programs, in which segments that are alike share one.

A compiler that is given a whole stage compiles each of its equal blocks anew. Here it is given one of each
kind: it runs with the state of whichever segment is at hand, and draws under that segment's numbers.
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

from varuna.capture.cuts.segment_kinds import find_kinds, ordinal_place
from varuna.capture.model.source import Source
from varuna.capture.run.captured import Captured
from varuna.capture.run.program import SpanProgram
from varuna.types import TensorSpec, Work

TRIFLING = 0.05
"""Of a chain's operations."""


class ChainLink(NamedTuple):
    program: SpanProgram  # of the first segment of its kind in the chain
    places: tuple[int, ...]  # of its state in the chain's
    first_ordinal: int  # the number of its first random operation


@dataclass(frozen=True)
class ProgramChain:
    """What a `Program` is, made of several."""

    segments: tuple[ChainLink, ...]
    state: tuple[str, ...]
    received: tuple[TensorSpec, ...]
    sent: tuple[TensorSpec, ...]
    mutated: tuple[str, ...]

    @property
    def leaves(self) -> Mapping[str, nn.Module]:
        return {name: leaf for segment in self.segments for name, leaf in segment.program.leaves.items()}

    @property
    def repeats(self) -> bool:
        return all(segment.program.repeats for segment in self.segments)

    def __call__(
        self, state: Sequence[Tensor], received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> tuple[Tensor, ...]:
        values = tuple(received)
        for program, places, first_ordinal in self.segments:
            own = msgspec.structs.replace(work, first_ordinal=first_ordinal) if program.random else work
            values = program([state[place] for place in places], values, inputs, own)
        return values

    def compiled(self) -> ProgramChain:
        """The same chain, its programs compiled when they first run, but for trifles."""
        known = {id(segment.program): segment.program for segment in self.segments}
        trifles = self._trifles()
        made = {key: program if key in trifles else program.compiled() for key, program in known.items()}
        return replace(self, segments=tuple(s._replace(program=made[id(s.program)]) for s in self.segments))

    def _trifles(self) -> set[int]:
        """Programs, by id, that take as long to compile as a whole block and have nothing to win by it: run
        once, before the loss, and all of them together next to nothing of the chain (an embedding)."""
        times = Counter(id(segment.program) for segment in self.segments)
        programs = {id(segment.program): segment.program for segment in self.segments}
        sizes = {key: _num_operations(program) for key, program in programs.items()}
        left = TRIFLING * sum(times[key] * size for key, size in sizes.items())
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
    segments = []
    for kind, program in zip(kinds[first:stop], programs, strict=True):
        start = _first_ordinal(program)
        if kind not in shared:
            shared[kind] = _counting_from_zero(program.to(device), start)
        segments.append(ChainLink(shared[kind], tuple(place_of[name] for name in program.state), start))
    return ProgramChain(
        tuple(segments),
        state,
        programs[0].received,
        programs[-1].sent,
        tuple(name for program in programs for name in program.mutated),
    )


def _num_operations(program: SpanProgram) -> int:
    return sum(node.op == "call_function" for node in program.graph_module.graph.nodes)


def _ordinals(program: SpanProgram) -> list[tuple[fx.Node, int]]:
    """The nodes that draw, and where among their arguments their number is."""
    places = ((node, ordinal_place(node)) for node in program.graph_module.graph.nodes)
    return [(node, place) for node, place in places if place is not None]


def _first_ordinal(program: SpanProgram) -> int:
    if program.leaves:  # an opaque module numbers its draws by itself, and is like no other
        return 0
    return min((int(str(node.args[place])) for node, place in _ordinals(program)), default=0)


def _counting_from_zero(program: SpanProgram, start: int) -> SpanProgram:
    """Changes a program that nobody else has."""
    for node, place in _ordinals(program) if start else ():
        args = list(node.args)
        args[place] = int(str(args[place])) - start
        node.args = tuple(args)
    program.graph_module.recompile()
    return program
