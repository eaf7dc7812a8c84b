"""Each patch of torch's internals finds what it relies on; a failure names the patch and torch's version."""

import inspect
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.fx.proxy
from torch import Tensor, fx, nn
from torch._export.passes import replace_set_grad_with_hop_pass as set_grad_pass
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional
from torch.utils import checkpoint

from varuna.capture.run.plain_randomness import _COMPOSITE
from varuna.capture.trace import patches

SUPPORTED = "torch 2.11 to 2.13"


def require(patch: str, condition: bool, expected: str) -> None:
    assert condition, (
        f"the patch {patch} of varuna/capture/trace/patches.py relies on {expected}; it is written for "
        f"{SUPPORTED}, installed is torch {torch.__version__}"
    )


def require_parameters(patch: str, owner: Any, name: str, *parameters: str) -> None:
    """`owner.name` exists and its parameters start with these."""
    function = inspect.getattr_static(owner, name, None)
    require(patch, function is not None, f"{owner.__name__}.{name}")
    found = tuple(inspect.signature(getattr(function, "__func__", function)).parameters)
    expected = f"{owner.__name__}.{name}({', '.join(parameters)}, ...), found ({', '.join(found)})"
    require(patch, found[: len(parameters)] == parameters, expected)


def fake_shapes() -> tuple[ShapeEnv, FakeTensorMode]:
    shapes = ShapeEnv()
    return shapes, FakeTensorMode(shape_env=shapes)


def test_fast_export() -> None:
    name = "fast_export"
    require_parameters(name, fx.GraphModule, "recompile", "self")
    require_parameters(name, torch.fx.proxy.TracerBase, "_filter_traceback_frames", "self")
    traceback = getattr(torch.fx.proxy, "CapturedTraceback", None)
    require(name, hasattr(traceback, "extract"), "torch.fx.proxy.CapturedTraceback.extract")
    require(name, hasattr(traceback, "summary"), "CapturedTraceback.summary")
    module = fx.symbolic_trace(nn.Linear(2, 2))
    require(name, hasattr(module.graph, "_codegen"), "fx.Graph._codegen")
    require(name, type(module) is not fx.GraphModule, "a class for each GraphModule")
    codegen = inspect.get_annotations(torch.fx.graph._PyTreeInfo)
    require(name, {"in_spec", "out_spec"} <= set(codegen), "_PyTreeInfo with in_spec and out_spec")
    with patches.fast_export(lambda frame: "model.py:1: line"):
        traced = torch.export.export(nn.Linear(2, 2), (torch.ones(3, 2),), strict=False)
    lines = {node.meta.get("stack_trace") for node in traced.graph.nodes if node.op == "call_function"}
    require(name, lines == {"model.py:1: line"}, "tracers that take their lines from CapturedTraceback")


class FrozenProduct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
            with torch.no_grad():
                z = y @ y
            return y * z


def test_no_grad_in_autocast() -> None:
    name = "no_grad_in_autocast"
    parameters = "node", "omit_if_same_with_ambient"
    require_parameters(name, set_grad_pass, "_is_set_grad_enabled_sub_mod", *parameters)
    with patches.no_grad_in_autocast():
        traced = torch.export.export(FrozenProduct(), (torch.ones(2, 2),), strict=False)
    regions = [str(node.target) for node in traced.graph.nodes if "wrap_with_set_grad" in str(node.target)]
    require(name, len(regions) == 1, "a part of the graph for each grad mode, which starts with autocast")


def test_function_apply() -> None:
    found = torch.autograd.Function.__dict__.get("apply")
    require("function_apply", isinstance(found, classmethod), "torch.autograd.Function.apply, a classmethod")
    base = super(torch.autograd.Function, torch.autograd.Function)
    require("function_apply", hasattr(base, "apply"), "an apply of the base of torch.autograd.Function")


def test_gradient_calls() -> None:
    require_parameters("gradient_calls", torch.autograd, "grad", "outputs", "inputs")
    require_parameters("gradient_calls", Tensor, "backward", "self")
    require_parameters("gradient_calls", Tensor, "register_hook", "self", "hook")


def test_unchecked_distributions() -> None:
    name = "unchecked_distributions"
    default = getattr(Distribution, "_validate_args", None)
    require(name, isinstance(default, bool), "Distribution._validate_args")


def test_symbolic_len() -> None:
    _, mode = fake_shapes()
    x = mode.from_tensor(torch.ones(3, 2), symbolic_context=None)
    with patches.symbolic_len():
        require("symbolic_len", len([1]) == 1 and len(x) == x.shape[0], "builtins.len")


def test_stable_sets() -> None:
    class Named(nn.Module):
        def forward(self) -> tuple[list[str], bool]:
            return list(set("qweruiop")), isinstance({1}, set)

    with patches.stable_sets(named := Named()):
        assert named() == (sorted("qweruiop"), True)
    assert "set" not in globals() and type(set()) is set


def test_simplified_min() -> None:
    require_parameters("simplified_min", ShapeEnv, "simplify", "self", "expr", "size_oblivious")
    require_parameters("simplified_min", ShapeEnv, "bound_sympy", "self", "expr")


def test_skipped_moves() -> None:
    require_parameters("skipped_moves", nn.Module, "_apply", "self", "fn", "recurse")
    layer = nn.Linear(2, 2)
    with patches.skipped_moves():
        weight = layer.weight
        require("skipped_moves", layer.to(torch.float32).weight is weight, "Module.to that calls _apply")
        require("skipped_moves", layer.to(torch.float64).weight.dtype == torch.float64, "the original _apply")


def test_untracked_modules() -> None:
    name = "untracked_modules"
    require_parameters(name, nn.Module, "_wrapped_call_impl", "self")
    require(name, "__call__" in nn.Module.__dict__, "nn.Module.__call__")
    with patches.untracked_modules():
        require(name, nn.Identity()(3) == 3, "_wrapped_call_impl that calls forward")


def test_discarded_guards() -> None:
    name = "discarded_guards"
    shapes, mode = fake_shapes()
    require(name, isinstance(getattr(shapes, "pending_fresh_unbacked_symbols", None), list), "a list of them")
    with mode:
        tensors = [torch.ones(3)]
    require(name, torch._guards.detect_fake_mode(tensors) is mode, "torch._guards.detect_fake_mode")
    before = list(shapes.pending_fresh_unbacked_symbols)
    with pytest.raises(ValueError), patches.discarded_guards(tensors):
        shapes.create_unbacked_symint()
        raise ValueError
    require(name, shapes.pending_fresh_unbacked_symbols == before, "pending_fresh_unbacked_symbols")
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    symbolic = mode.from_tensor(torch.ones(6), symbolic_context=context)
    refused = False
    try:
        with patches.discarded_guards([symbolic]):
            bool(symbolic.shape[0] == 6)
    except Exception:
        refused = True
    require(name, refused, "ShapeEnv.error_on_new_guards or ShapeEnv._check_frozen")
    require(name, hasattr(fake_tensor, "unset_fake_temporarily"), "fake_tensor.unset_fake_temporarily")


def test_disabled_checkpointing() -> None:
    name = "disabled_checkpointing"
    generator = "_checkpoint_without_reentrant_generator"
    require(name, inspect.isgeneratorfunction(getattr(checkpoint, generator, None)), generator)
    require_parameters(
        name, checkpoint.CheckpointFunction, "forward", "ctx", "run_function", "preserve_rng_state"
    )
    ran: list[int] = []

    def run(x: Tensor) -> Tensor:
        ran.append(1)
        return x * 2

    x = torch.ones(2, requires_grad=True)
    with patches.disabled_checkpointing(lambda function, operands: function(*operands)):
        for reentrant in (True, False):
            checkpoint.checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    require(name, len(ran) == 2, "checkpoint that uses CheckpointFunction and the generator")


def test_without_overrides() -> None:
    for function in _COMPOSITE:
        names = set(function.__code__.co_names)
        known = {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
        require("without_overrides", bool(names & known), f"{function.__name__} that checks for overrides")
        require("without_overrides", known <= set(vars(functional)), f"{known} in torch.nn.functional")
        require("without_overrides", callable(patches.without_overrides(function)), "a plain function")


def test_operation_cache() -> None:
    """Not a patch, but it uses private names of torch as well."""
    name = "(the operation cache)"
    fake = FakeTensor(fake_shapes()[1], torch.ones(2, device="meta"), torch.device("cpu"))
    require(
        name, fake.device.type == "cpu" and fake.shape == (2,), "FakeTensor(mode, tensor on meta, device)"
    )
    require_parameters(name, proxy_tensor, "get_proxy_mode")
    require_parameters(name, proxy_tensor, "get_proxy_slot", "obj", "tracer", "default")
    require_parameters(name, proxy_tensor, "set_proxy_slot", "obj", "tracer", "proxy")
    require_parameters(name, fake_tensor, "in_kernel_invocation_manager", "fake_mode")
    fields = set(inspect.get_annotations(proxy_tensor._ProxyTensor))
    require(name, {"proxy", "constant"} <= fields, "_ProxyTensor with proxy and constant")
    require(name, hasattr(torch._C._functorch, "peek_interpreter_stack"), "peek_interpreter_stack")
    require(name, callable(torch._C._is_any_autocast_enabled), "torch._C._is_any_autocast_enabled")


def test_refusals() -> None:
    """The line that fixes the batch size is read from torch's guards."""
    shapes, _ = fake_shapes()
    require("(refusals)", isinstance(shapes.guards, list), "ShapeEnv.guards")
    fields = set(inspect.get_annotations(torch.fx.experimental.symbolic_shapes.ShapeGuard))
    require("(refusals)", {"expr", "sloc"} <= fields, "ShapeGuard with expr and sloc")


def test_kept_attention_masks() -> None:
    name = "kept_attention_masks"
    require_parameters(name, nn.modules.transformer, "_detect_is_causal_mask", "mask", "is_causal", "size")
    with patches.kept_attention_masks():
        detect = nn.modules.transformer._detect_is_causal_mask
        require(name, detect(torch.zeros(2, 2), None, 2) is False, "a plain function")


def test_number_conditions() -> None:
    name = "number_conditions"
    shapes, mode = fake_shapes()
    x = mode.from_tensor(torch.ones(3, 2), symbolic_context=None)
    with mode:
        condition = (x > 0).sum().item() > 4
    require(name, isinstance(condition, torch.SymBool), "numbers of fake tensors that are symbolic")
    with patches.number_conditions(lambda _: True):
        require(name, bool(condition) is True, "torch.SymBool.__bool__")
    require(name, shapes.num_deferred_runtime_asserts == 0, "no guard")


def test_recurrent_precision() -> None:
    name = "recurrent_precision"
    lstm, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    before = torch._VF.lstm
    with patches.recurrent_precision(True), patch.object(torch, "is_autocast_enabled", lambda _: True):
        require(name, torch._VF.lstm is not before, "nn.LSTM calls torch._VF.lstm")
        require(name, lstm(x)[0].dtype == torch.float32, "torch._VF.lstm on the CPU unchanged")
    require(name, torch._VF.lstm == before, "torch._VF whose attributes can be replaced")
    with FakeTensorMode():
        on_cuda = torch.empty(2, device="cuda")
    with (
        patch.object(torch._VF, "lstm", lambda *_: (on_cuda, on_cuda)),
        patches.recurrent_precision(True),
        patch.object(torch, "is_autocast_enabled", lambda _: True),
    ):
        dtypes = {value.dtype for value in torch._VF.lstm()}  # type: ignore[call-arg]
        require(name, dtypes == {torch.float16}, "results on CUDA in fp16")
