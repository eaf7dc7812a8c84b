"""Cross entropy over a large vocabulary, computed without storing all scores.

A language model ends in `cross_entropy(hidden @ weight.T, labels)`. For 8,192 tokens and a vocabulary of
50,257 the scores alone take 1.6 GB in fp32, and the operations after them three times as much. The fused
loss takes a block of tokens at a time from the hidden values to the loss and to its gradients, and keeps
only the gradients:

    rows of hidden ─► scores ─► loss
                         └────► gradient of the scores ─► gradient of the rows, and a share of the weight's

The gradients are computed before the gradient of the loss is known, and scaled by it in the backward. In
fp16 they would lack the loss scale, so fp16 keeps the plain loss. The weight is padded to a multiple of 64
rows: a GPU takes five times as long for a product with 50,257 columns as for one with 50,304.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from varuna.capture.graph.randomness import bound
from varuna.capture.run.program import SpanProgram, UnderAutocast, attributes, build

aten = torch.ops.aten
CROSS_ENTROPY = aten.cross_entropy_loss.default
LINEAR = aten.linear.default
SAME_VALUES = (aten.alias.default, aten.contiguous.default, aten.clone.default)
VIEWS = (aten.view.default, aten.reshape.default)
MEAN, SUM = 1, 2

MIN_VOCABULARY = 4096  # below it, the scores are small compared with the rest
BLOCK_BYTES = 1 << 30  # of a block's scores in fp32
MULTIPLE = 64


def with_fused_loss(program: SpanProgram) -> SpanProgram:
    """Fuse the losses of a program that runs on a GPU in fp32 or bf16.

    Do not compile the result: the compiler fuses the plain loss as well.
    """
    if program.device.type != "cuda" or program.precision == "fp16":
        return program
    return fuse_losses(program)


def fuse_losses(program: SpanProgram) -> SpanProgram:
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph_module.graph, {}))
    losses = [node for node in graph.nodes if _operation(node) is CROSS_ENTROPY]
    if not any([_fuse(graph, node) for node in losses]):
        return program
    graph.eliminate_dead_code()
    return replace(program, graph_module=build(graph, attributes(program.graph_module)))


def _fuse(graph: fx.Graph, loss: fx.Node) -> bool:
    """Fuse one loss with the product that makes its scores; return whether that is possible."""
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
    if isinstance(loss.target, UnderAutocast) and not any(map(_widens, steps)):
        return False  # without autocast, the loss is computed in the precision of the scores
    args: Any = scores.args
    hidden, weight, *bias = args
    if "val" not in hidden.meta:
        return False
    width = hidden.meta["val"].shape[-1]
    with graph.inserting_before(loss):
        for step in reversed(steps):
            # Apply to the hidden rows what a step does to the rows of scores.
            if _operation(step) in VIEWS:
                hidden = graph.call_function(aten.reshape.default, (hidden, [*_sizes(step)[:-1], width]))
            elif _operation(step) is aten.slice.Tensor:
                hidden = graph.call_function(aten.slice.Tensor, (hidden, *step.args[1:]), step.kwargs)
        options = (given["ignore_index"], given["reduction"] == MEAN)
        fused = graph.call_function(
            fused_cross_entropy, (hidden, weight, bias[0] if bias else None, labels, *options)
        )
    fused.meta = dict(loss.meta)
    loss.replace_all_uses_with(fused)
    graph.erase_node(loss)
    return True


def _operation(node: fx.Node) -> Any:
    """Return what a node computes. A loss may turn off the autocast in which its scores are computed."""
    return node.target.operation if isinstance(node.target, UnderAutocast) else node.target


def _path_to_scores(node: Any) -> list[fx.Node] | None:
    """Return the nodes from the loss's input back to its product, if only the loss uses them."""
    path = []
    while isinstance(node, fx.Node) and len(node.users) == 1 and isinstance(node.meta.get("val"), Tensor):
        path.append(node)
        vocabulary = node.meta["val"].shape[-1]
        if node.target is LINEAR:
            return path if isinstance(vocabulary, int) and vocabulary >= MIN_VOCABULARY else None
        keeps_rows = (
            _operation(node) in SAME_VALUES
            or _widens(node)
            or (_operation(node) in VIEWS and _sizes(node)[-1] == vocabulary)
            or (_operation(node) is aten.slice.Tensor and _is_of_rows(node))
        )
        if not keeps_rows:
            return None
        node = node.args[0]
    return None


def _sizes(view: fx.Node) -> list[Any]:
    sizes: Any = view.args[1]
    return list(sizes)


def _widens(node: fx.Node) -> bool:
    """Return whether a node only converts to fp32, as the fused loss does too."""
    if _operation(node) is not aten.to.dtype or node.args[1] is not torch.float32:
        return False
    (source,) = node.all_input_nodes
    form = source.meta.get("val")
    return form is not None and torch.promote_types(form.dtype, torch.float32) is torch.float32


def _is_of_rows(node: fx.Node) -> bool:
    dim, dims = node.args[1] if len(node.args) > 1 else 0, node.meta["val"].dim()
    return isinstance(dim, int) and dim % dims != dims - 1


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, mean: bool
) -> Tensor:
    """Compute cross_entropy(linear(hidden, weight, bias), labels) in the current autocast precision."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    training = torch.is_grad_enabled()
    apply: Any = _FusedLoss.apply
    with torch.autocast(kind, enabled=False):
        loss: Tensor = apply(hidden, weight, bias, labels, ignore_index, mean, dtype, training)
    return loss


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        mean: bool,
        dtype: torch.dtype,
        training: bool,
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        vocabulary, width = weight.shape
        columns = -(-vocabulary // MULTIPLE) * MULTIPLE
        matrix = F.pad(weight.to(dtype), (0, 0, 0, columns - vocabulary))
        offsets = None if bias is None else F.pad(bias.to(dtype), (0, columns - vocabulary))
        rows = hidden.reshape(-1, width).to(dtype)
        counted = labels != ignore_index
        share = 1 / counted.sum().to(wide) if mean else torch.ones((), dtype=wide, device=rows.device)
        total = torch.zeros((), dtype=wide, device=rows.device)
        wanted = [training and needed for needed in ctx.needs_input_grad[:3]]
        of_rows = torch.empty_like(rows) if wanted[0] else None
        of_matrix = torch.zeros(matrix.shape, dtype=wide, device=rows.device) if wanted[1] else None
        of_offsets = torch.zeros(columns, dtype=wide, device=rows.device) if wanted[2] else None
        for first, stop in row_blocks(len(rows), columns * wide.itemsize):
            block, valid = rows[first:stop], counted[first:stop]
            scores = block @ matrix.t() if offsets is None else torch.addmm(offsets, block, matrix.t())
            scores[:, vocabulary:] = float("-inf")
            log_probs = torch.log_softmax(scores, -1, dtype=wide)
            label = labels[first:stop].where(valid, 0).unsqueeze(1)
            total -= log_probs.gather(1, label).squeeze(1).where(valid, 0).sum()
            if not any(wanted):
                continue
            log_probs.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=wide))
            torch.mul(log_probs, (valid * share).unsqueeze(1), out=scores)  # in place, in the low precision
            del log_probs
            if of_rows is not None:
                torch.mm(scores, matrix, out=of_rows[first:stop])
            if of_matrix is not None:
                of_matrix += scores.t() @ block
            if of_offsets is not None:
                of_offsets += scores.sum(0, dtype=wide)
        ctx.save_for_backward(of_rows, of_matrix, of_offsets)
        bias_dtype = bias.dtype if bias is not None else None
        ctx.forms = hidden.shape, hidden.dtype, vocabulary, weight.dtype, bias_dtype
        return total * share if mean else total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_rows, of_matrix, of_offsets = ctx.saved_tensors
        shape, hidden_dtype, vocabulary, weight_dtype, bias_dtype = ctx.forms
        wanted = ctx.needs_input_grad
        return (
            (of_rows.to(hidden_dtype) * gradient.to(hidden_dtype)).view(shape) if wanted[0] else None,
            (of_matrix[:vocabulary] * gradient).to(weight_dtype) if wanted[1] else None,
            (of_offsets[:vocabulary] * gradient).to(bias_dtype) if wanted[2] else None,
            *([None] * 5),
        )


def row_blocks(count: int, row_bytes: int) -> list[tuple[int, int]]:
    """Divide rows into blocks of equal size, none larger than BLOCK_BYTES."""
    number = max(1, -(-count * row_bytes // BLOCK_BYTES))
    size = max(1, -(-count // number))
    return [(first, min(first + size, count)) for first in range(0, count, size)]
