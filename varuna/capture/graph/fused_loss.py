"""The loss over a large vocabulary without the table of all its scores.

A language model ends in `cross_entropy(hidden @ weight.T, labels)`: for 8,192 tokens and 50,257 words the
scores alone take 1.6 GB in fp32, and as much again three times over in what follows. Here some tokens at a
time are taken from the hidden values to their loss and, at one go, to its gradients; only these are kept:

    rows of hidden ─► scores ─► loss
                         └────► their gradient ─► that of the rows, and a share of the weight's

The gradients are made before the loss's own is known, and scaled by it in the backward; in fp16 they would
lack the loss scale by then, so fp16 is left as it was. The weight's rows are filled up to a multiple of 64: a
GPU takes five times as long for a product with 50,257 columns as for one with 50,304.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from varuna.capture.graph.randomness import bound
from varuna.capture.run.program import SpanProgram, attributes, build

aten = torch.ops.aten
CROSS_ENTROPY = aten.cross_entropy_loss.default
LINEAR = aten.linear.default
SAME_VALUES = (aten.alias.default, aten.contiguous.default, aten.clone.default)
VIEWS = (aten.view.default, aten.reshape.default)
MEAN, SUM = 1, 2

LEAST_WORDS = 4096
"""Below it the scores are small beside everything else."""
PART_BYTES = 1 << 30
"""Of a part's scores in fp32."""
MULTIPLE = 64


def with_fused_loss(program: SpanProgram) -> SpanProgram:
    """The same program, on a GPU, in a precision that allows it; else the very same. Not to be compiled:
    a compiler does as well by itself."""
    if program.device.type != "cuda" or program.precision == "fp16":
        return program
    return fuse_losses(program)


def fuse_losses(program: SpanProgram) -> SpanProgram:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph_module.graph, {}))
    losses = [node for node in graph.nodes if node.target is CROSS_ENTROPY]
    if not any([_join(graph, node) for node in losses]):
        return program
    graph.eliminate_dead_code()
    return replace(program, graph_module=build(graph, attributes(program.graph_module)))


def _join(graph: fx.Graph, loss: fx.Node) -> bool:
    """Whether this loss was one that could be made together with its scores, and is now."""
    given = bound(CROSS_ENTROPY, loss.args, loss.kwargs)
    labels = given["target"]
    simple = given["weight"] is None and given["label_smoothing"] == 0 and given["reduction"] in (MEAN, SUM)
    form = labels.meta.get("val")
    if not simple or form is None or form.is_floating_point() or form.dim() != 1:
        return False
    path = _path_to_scores(given["self"])
    if path is None:
        return False
    *steps, scores = path
    args: Any = scores.args
    hidden, weight, *bias = args
    if "val" not in hidden.meta:
        return False
    width = hidden.meta["val"].shape[-1]
    with graph.inserting_before(loss):
        for step in reversed(steps):
            hidden = _same_step(graph, step, hidden, width)
        options = (given["ignore_index"], given["reduction"] == MEAN)
        joint = graph.call_function(
            fused_cross_entropy, (hidden, weight, bias[0] if bias else None, labels, *options)
        )
    joint.meta = dict(loss.meta)
    loss.replace_all_uses_with(joint)
    graph.erase_node(loss)
    return True


def _path_to_scores(node: Any) -> list[fx.Node] | None:
    """From what the loss is given back to the product that makes it, all of it for the loss alone."""
    path = []
    while isinstance(node, fx.Node) and len(node.users) == 1 and isinstance(node.meta.get("val"), Tensor):
        path.append(node)
        words = node.meta["val"].shape[-1]
        if node.target is LINEAR:
            return path if isinstance(words, int) and words >= LEAST_WORDS else None
        along_rows = (
            node.target in SAME_VALUES
            or _widens(node)
            or (node.target in VIEWS and _sizes(node)[-1] == words)
            or (node.target is aten.slice.Tensor and _is_of_rows(node))
        )
        if not along_rows:
            return None
        node = node.args[0]
    return None


def _sizes(view: fx.Node) -> list[Any]:
    sizes: Any = view.args[1]
    return list(sizes)


def _widens(node: fx.Node) -> bool:
    """Numbers of fewer bits are made fp32, as the joint loss does by itself."""
    if node.target is not aten.to.dtype or node.args[1] is not torch.float32:
        return False
    (source,) = node.all_input_nodes
    form = source.meta.get("val")
    return form is not None and torch.promote_types(form.dtype, torch.float32) is torch.float32


def _is_of_rows(node: fx.Node) -> bool:
    dim, dims = node.args[1] if len(node.args) > 1 else 0, node.meta["val"].dim()
    return isinstance(dim, int) and dim % dims != dims - 1


def _same_step(graph: fx.Graph, step: fx.Node, hidden: Any, width: int) -> Any:
    """What was done to the rows of scores, done to the rows that they are made from."""
    if step.target in VIEWS:
        return graph.call_function(aten.reshape.default, (hidden, [*_sizes(step)[:-1], width]))
    if step.target is aten.slice.Tensor:
        return graph.call_function(aten.slice.Tensor, (hidden, *step.args[1:]), step.kwargs)
    return hidden


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignored: int, mean: bool
) -> Tensor:
    """cross_entropy(linear(hidden, weight, bias), labels), in the precision of the autocast that is on."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    trains = torch.is_grad_enabled()
    apply: Any = _Loss.apply
    with torch.autocast(kind, enabled=False):
        loss: Tensor = apply(hidden, weight, bias, labels, ignored, mean, dtype, trains)
    return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignored: int,
        mean: bool,
        dtype: torch.dtype,
        trains: bool,
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        words, width = weight.shape
        columns = -(-words // MULTIPLE) * MULTIPLE
        matrix = F.pad(weight.to(dtype), (0, 0, 0, columns - words))
        offsets = None if bias is None else F.pad(bias.to(dtype), (0, columns - words))
        rows = hidden.reshape(-1, width).to(dtype)
        counted = labels != ignored
        share = 1 / counted.sum().to(exact) if mean else torch.ones((), dtype=exact, device=rows.device)
        total = torch.zeros((), dtype=exact, device=rows.device)
        needs = [trains and needed for needed in ctx.needs_input_grad[:3]]
        of_rows = torch.empty_like(rows) if needs[0] else None
        of_matrix = torch.zeros(matrix.shape, dtype=exact, device=rows.device) if needs[1] else None
        of_offsets = torch.zeros(columns, dtype=exact, device=rows.device) if needs[2] else None
        for first, stop in parts(len(rows), columns * exact.itemsize):
            part, here = rows[first:stop], counted[first:stop]
            scores = part @ matrix.t() if offsets is None else torch.addmm(offsets, part, matrix.t())
            scores[:, words:] = float("-inf")
            chances = torch.log_softmax(scores, -1, dtype=exact)
            asked = labels[first:stop].where(here, 0).unsqueeze(1)
            total -= chances.gather(1, asked).squeeze(1).where(here, 0).sum()
            if not any(needs):
                continue
            chances.exp_().scatter_add_(1, asked, torch.full_like(asked, -1, dtype=exact))
            torch.mul(chances, (here * share).unsqueeze(1), out=scores)  # and rounds
            del chances
            if of_rows is not None:
                torch.mm(scores, matrix, out=of_rows[first:stop])
            if of_matrix is not None:
                of_matrix += scores.t() @ part
            if of_offsets is not None:
                of_offsets += scores.sum(0, dtype=exact)
        ctx.save_for_backward(of_rows, of_matrix, of_offsets)
        ctx.forms = hidden.shape, hidden.dtype, words, weight.dtype, bias.dtype if bias is not None else None
        return total * share if mean else total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_rows, of_matrix, of_offsets = ctx.saved_tensors
        shape, hidden_dtype, words, weight_dtype, bias_dtype = ctx.forms
        needs = ctx.needs_input_grad
        return (
            (of_rows.to(hidden_dtype) * gradient.to(hidden_dtype)).view(shape) if needs[0] else None,
            (of_matrix[:words] * gradient).to(weight_dtype) if needs[1] else None,
            (of_offsets[:words] * gradient).to(bias_dtype) if needs[2] else None,
            *([None] * 5),
        )


def parts(count: int, row_bytes: int) -> list[tuple[int, int]]:
    """Rows in equal parts, of which none takes more than its share of memory."""
    number = max(1, -(-count * row_bytes // PART_BYTES))
    size = max(1, -(-count // number))
    return [(first, min(first + size, count)) for first in range(0, count, size)]
