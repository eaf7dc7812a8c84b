"""A chain of programs, in which equal segments share one, computes what the span's program computes."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, fx

from tests.toys import make_inputs, make_model
from varuna.capture import Source, StageState, stage_state
from varuna.capture.run.chain import ProgramChain, chain_of
from varuna.capture.run.program import SpanProgram, start_compiler
from varuna.types import Work

WORK = Work(seed=5, step=1, first_sample=2)


def run(
    program: SpanProgram | ProgramChain, state: StageState, inputs: dict[str, object]
) -> dict[str, Tensor]:
    """The loss, and the gradients by name."""
    tensors = {name: state.tensor(name) for name in program.state}
    (loss,) = program(list(tensors.values()), [], inputs, WORK)
    trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()))
    return {"loss": loss, **dict(zip(trained, found, strict=True))}


def test_a_chain_computes_what_the_span_does_with_dropout_drawn_by_each_layer() -> None:
    """V16: the layers share one program but no masks."""
    model = make_model("GPT", dtype=torch.float64, layers=4, dropout=0.3)
    inputs = make_inputs("GPT", 3, torch.Generator().manual_seed(1), torch.float64)
    source = Source(model)
    captured = source.capture(inputs, training=True)
    span = 0, captured.num_segments
    state = stage_state(source, captured, *span, device="cpu")
    chain = chain_of(source, captured, *span, torch.device("cpu"))
    assert len({id(link.program) for link in chain.links}) == 3 < len(chain.links)
    expected = run(captured.carve(*span), state, inputs)
    torch.testing.assert_close(run(chain, state, inputs), expected, rtol=1e-12, atol=1e-14)


def test_an_embedding_before_many_blocks_is_not_worth_compiling() -> None:
    """The loss is; with few blocks, everything is."""
    inputs = make_inputs("GPT", 3, torch.Generator().manual_seed(1))
    compiled = {}
    for layers in (2, 12):
        source = Source(make_model("GPT", layers=layers))
        captured = source.capture(inputs, training=True)
        chain = chain_of(source, captured, 0, captured.num_segments, torch.device("cpu")).compiled()
        plain = [isinstance(link.program.graph_module, fx.GraphModule) for link in chain.links]
        assert not any(plain[1:])
        compiled[layers] = not plain[0]
    assert compiled == {2: True, 12: False}


def test_the_compiler_is_started_early_on_a_gpu_if_torch_has_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, started = "torch._inductor.async_compile", []
    stand_in = SimpleNamespace(maybe_warm_pool=lambda: started.append(True))
    monkeypatch.setitem(sys.modules, module, stand_in)  # type: ignore[arg-type]
    start_compiler(torch.device("cpu"))
    assert not started
    start_compiler(torch.device("cuda", 0))
    assert started == [True]
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    start_compiler(torch.device("cuda", 0))
