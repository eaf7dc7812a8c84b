"""Tasks that pool workers run on a GPU."""

import os
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import tests.tasks
from tests.tasks import logged, make_inputs, stage_map
from tests.toys import make_model
from varuna import CutPoint, Varuna, cut_after
from varuna.errors import VarunaError
from varuna.execute.comm.frames import meta_of, to_contiguous
from varuna.execute.comm.groups import reduce_backend
from varuna.execute.comm.lanes import GroupLane, LaneReceiver, LaneSender, make_nccl_group
from varuna.execute.update.reduce import Reducer

DEVICE = "cuda:0"


def wrap(name: str, depth: int, *, batch: int, chunk: int, **options: Any) -> tuple[Varuna, Any]:
    sample = make_inputs(name, 2, torch.Generator().manual_seed(1), torch.float32)
    model = Varuna(make_model(name), stage_map(depth, 1), sample, batch, chunk, device=DEVICE, **options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.set_optimizer(optimizer, init_loss_scale=1024)
    return model, optimizer


@contextmanager
def nothing_waits_for_the_device() -> Any:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_without_waiting(
    precision: str, weigh: Callable[..., float] | None, cuda_graphs: bool = False
) -> list[float]:
    """Return losses of steps in which any wait for the device except for the loss is an error."""
    options: dict[str, Any] = {"precision": precision, "loss_weight": weigh, "cuda_graphs": cuda_graphs}
    model, optimizer = wrap("GPT", 1, batch=6, chunk=2, **options)
    inputs = make_inputs("GPT", 6, torch.Generator().manual_seed(2), torch.float32)
    losses = []
    for step in range(4):
        with nothing_waits_for_the_device() if step else nullcontext():
            loss, _ = model.step(inputs, clip_grad_max_norm=1.0 if precision == "fp16" else None)
            optimizer.step()
            model.zero_grad()
        losses.append(loss)
    return losses


def count_tokens(inputs: Any) -> float:
    return float((inputs["labels"] != -100).sum())


def channels_used() -> dict[int, str]:
    model, optimizer = wrap("GPT", 3, batch=4, chunk=1)
    inputs = make_inputs("GPT", 4, torch.Generator().manual_seed(2), torch.float32)
    for _ in range(3):
        model.step(inputs)
        optimizer.step()
        model.zero_grad()
    found = model.channels
    model.close()
    return found


def lose_the_last_stage(report: str, **options: Any) -> None:
    """End the last stage in the middle of the third step, with work queued on the device."""
    steps = [0]

    def die(op: str, microbatch: int) -> float:
        if steps[0] == 2 and op == "B" and microbatch == 1 and int(os.environ["RANK"]) == 1:
            os._exit(9)
        return 0.0

    model, _ = wrap("GPT", 2, batch=4, chunk=1, compute_delay=die, timeout_seconds=20, **options)
    inputs = make_inputs("GPT", 4, torch.Generator().manual_seed(2), torch.float32)
    try:
        for _ in range(4):
            model.step(inputs)
            model.zero_grad()
            steps[0] += 1
    except VarunaError as error:
        Path(report).write_text(f"{type(error).__name__}: {error}")
        os._exit(0)


class Lookup(nn.Module):
    """A model whose second stage looks up rows in its table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.table = nn.Linear(4, 4), CutPoint(), nn.Embedding(8, 4)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        hidden = self.cut(self.first(x))
        found: Tensor = self.table(rows) + hidden
        return found.square().mean()


def fail_on_the_device(folder: str) -> None:
    """Run a step with a row outside the second stage's table; both ranks report the error and end."""
    x, rows = torch.ones(8, 4), torch.arange(8)
    sample = {"x": x[:2], "rows": rows[:2]}
    model = Varuna(Lookup(), "0;1", sample, 8, 2, device=DEVICE, from_cache=False, timeout_seconds=20)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        model.step({"x": x, "rows": rows + 5})
    except (VarunaError, RuntimeError) as error:
        said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        Path(folder, os.environ["RANK"]).write_text(said)
        model.close()  # says goodbye, though there is no device to wait for
    os._exit(0)


class Heavy(nn.Module):
    """Holds 12 MiB between its forward and its backward for each sample, on its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.second = nn.Linear(4, 1 << 20), CutPoint(), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(torch.sin(torch.sin(self.first(x)))).mean(-1, keepdim=True)
        return self.second(self.cut(y)).mean()


def hold_activations(schedule: str) -> tuple[int, int, int]:
    """Return the bytes that the first stage adds at its peak, and what torch reserves after 3 and 10 steps.

    Each step has 8 micro-batches; the last one is smaller.
    """
    x = torch.ones(30, 4)
    options: dict[str, Any] = {"schedule": schedule, "recompute": False, "from_cache": False}
    model = Varuna(Heavy(), "0;1", {"x": x[:2]}, 30, 4, device=DEVICE, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    reserved, peaks = [], []
    for _ in range(10):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.step({"x": x})
        peaks.append(torch.cuda.max_memory_allocated() - before)
        reserved.append(torch.cuda.memory_reserved())
        optimizer.step()
        model.zero_grad()
    model.close()
    return max(peaks), reserved[2], reserved[-1]


class Wide(nn.Module):
    """Holds 64 MiB between its forward and its backward for each sample, on its second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(4, 4), nn.Linear(4, 1 << 22), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.cut(self.first(x)))
        return torch.sin(torch.sin(torch.sin(torch.sin(y)))).mean()


def run_out_of_memory(chunk: int) -> str:
    """Return the error of this rank if the second stage has 1.4 GiB of memory."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    x = torch.ones(64, 4)
    error = ""
    model = Varuna(Wide(), "0;1", {"x": x[:2]}, 64, chunk, device=DEVICE, from_cache=False)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.4 * 2**30 / total)
    try:
        model.step({"x": x})
    except VarunaError as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    return error


def train_gpt2_with_flash_attention_alone() -> float:
    """Return a loss of Hugging Face's GPT-2 with only this attention kernel allowed."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=128, n_head=2, n_positions=64, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    model = transformers.GPT2LMHeadModel(config)
    cut_after(model, "transformer.h.0")
    tokens = torch.randint(64, (4, 64))
    inputs = {"input_ids": tokens, "labels": tokens}
    wrapped = Varuna(model, "0;", inputs, 4, 2, device=DEVICE, precision="bf16", from_cache=False)
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return wrapped.step(inputs)[0]


class Biased(nn.Module):
    """Attends twice with one learned bias, as T5 does; heads are the bias's innermost dimension in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.first, self.second = nn.Embedding(9, 2), nn.Linear(16, 16), nn.Linear(16, 16)
        self.cut = CutPoint()

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        distances = (torch.arange(12)[:, None] - torch.arange(12)).abs().clamp(max=8).to(x.device)
        bias = self.bias(distances).permute(2, 0, 1).unsqueeze(0)
        x = self.cut(x + self._attend(self.first(x), bias, visible))
        return (x + self._attend(self.second(x), bias, visible)).square().mean()

    def _attend(self, x: Tensor, bias: Tensor, visible: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        mask = torch.where(visible, bias.to(heads.dtype), torch.finfo(heads.dtype).min)
        found = functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, dropout_p=0.125)
        return found.transpose(1, 2).flatten(2)


def three_losses(model: Varuna, inputs: dict[str, Tensor]) -> list[float]:
    """Train for three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer, init_loss_scale=1)
    losses = []
    for _ in range(3):
        losses.append(model.step(inputs)[0])
        optimizer.step()
        model.zero_grad()
    model.close()
    return losses


def train_biased(depth: int, precision: str, recompute: bool, device: str = DEVICE) -> list[float]:
    """Return the losses of three steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "x": torch.randn(6, 12, 16, generator=generator),
        "visible": torch.rand(6, 1, 12, 12, generator=generator) > 0.2,
    }
    options: dict[str, Any] = {"precision": precision, "recompute": recompute, "from_cache": False, "seed": 3}
    model = Varuna(Biased(), stage_map(depth, 1), inputs, 6, 2, device=device, **options)
    return three_losses(model, inputs)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 16, batch_first=True), nn.GRU(16, 8, batch_first=True)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cuts[0](self.lstm(x)[0])
        return self.cuts[1](self.gru(h)[0] * 2 + 1).float().square().mean()


def train_recurrent(depth: int, precision: str) -> list[float]:
    """Return the losses of three steps."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(6, 9, 8, generator=torch.Generator().manual_seed(1))}
    options: dict[str, Any] = {"precision": precision, "from_cache": False}
    model = Varuna(Recurrent(), stage_map(depth, 1), inputs, 6, 2, device=DEVICE, **options)
    return three_losses(model, inputs)


class WaitsAtOnce:
    def for_work(self, work: dist.Work, what: Callable[[], str]) -> None:
        work.wait()

    def for_device(self, done: Callable[[], bool]) -> None:
        torch.cuda.synchronize()


def send_by_nccl(count: int) -> list[list[list[float]]]:
    """Return what arrives over a lane with both ends on one rank: NCCL allows one rank per GPU."""
    store = distributed_c10d.PrefixStore("nccl", distributed_c10d._get_default_store())
    device = torch.device(DEVICE)
    with torch.cuda.device(device):
        backend = make_nccl_group(store, 0, 1, timedelta(seconds=60))
        lane = GroupLane("NCCL", backend, sends=True, device=device)
    outlet, inlet = LaneSender(lane), LaneReceiver(lane, device)
    found = []
    for number in range(count):
        sent = [torch.full((3, 2), float(number), device=device).t(), torch.ones(0, device=device)]
        with nothing_waits_for_the_device():
            outlet.put([to_contiguous(tensor) for tensor in sent])
            inlet.expect([meta_of(torch.float32, (2, 3)), meta_of(torch.float32, (0,))])
            arrived = inlet.tensors()
            outlet.release_sent()
            inlet.take_freed()
        found.append([list(tensor.shape) for tensor in arrived])
    outlet.finish(60)
    return found


def train_by_lane(**options: Any) -> tuple[dict[str, Any], set[str]]:
    """Train with gloo lanes between stages on one GPU; also return the names of the channels."""
    channels: set[str] = set()

    class ChannelCollector(Varuna):
        def step(self, *args: Any, **kwargs: Any) -> tuple[float, bool]:
            channels.update(self.channels.values())
            return super().step(*args, **kwargs)

    before = tests.tasks.Varuna
    tests.tasks.Varuna = ChannelCollector  # type: ignore[misc]
    try:
        return tests.tasks.train(**options, channel="group"), channels
    finally:
        tests.tasks.Varuna = before  # type: ignore[misc]


def reduce_by_nccl() -> tuple[float, list[list[float]]]:
    """Return loss and gradients of a step of one rank that reduces with itself."""
    group = dist.new_group([0], backend=reduce_backend(["a GPU of its own"]))
    weights = [nn.Parameter(torch.zeros(size, device=DEVICE)) for size in (2, 1)]
    reducer = Reducer(weights, replicas=group, everyone=None, counts_norm=True, waiter=WaitsAtOnce())
    reducer.begin()
    stop = reducer.expect_last_backward()
    first, second = weights
    (first[0] + 2 * first[1] + 3 * second.sum()).backward()  # type: ignore[no-untyped-call]
    stop()
    reducer.announce(2.0, 1.0)
    totals = reducer.finish(nominal_weight=1.0, loss_scale=1.0, checks_overflow=True, max_norm=None)
    return totals.loss, [weight.grad.tolist() for weight in weights if weight.grad is not None]


class Choosing(nn.Module):
    """A model whose sizes depend on values, which the host must read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y[x > 0].square().sum()


def run_unrecordable(cuda_graphs: bool) -> tuple[list[float], list[str]]:
    """Return losses and warnings."""
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = Varuna(Choosing(), "0", {"x": x}, 8, 2, device=DEVICE, from_cache=False, cuda_graphs=cuda_graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.set_optimizer(optimizer)
    losses = []
    with logged() as warnings:
        for _ in range(3):
            losses.append(model.step({"x": x})[0])
            optimizer.step()
            model.zero_grad()
    return losses, warnings
