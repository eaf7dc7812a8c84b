"""The benchmark of a GPU: `python -m benchmarks.gpu [NAME...]`, one table and one JSON.

A model as Hugging Face has it, in bf16, against the bare PyTorch loop on the same card: time, memory,
compiling, stages as processes on the one card, channel bandwidth, and predictions from a profile.
Every case runs in fresh processes; times are medians of single steps, the card idle before and after each.
"""

import argparse
import gc
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# Before torch is imported, here and in the workers.
os.environ.setdefault("OMP_NUM_THREADS", "4")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.gpu_models import FAMILIES, OF_IMAGES, make_images
from benchmarks.trainers import seconds_per_update
from tests.pool import Pool
from varuna import Varuna, cut_after
from varuna.execute.comm.network import connect
from varuna.plan.cost.forecast import forecast_plan
from varuna.profile.profiler import Profiler
from varuna.types import Cluster, Machine, format_stage_map

HOME = Path(__file__).parent
DEVICE = torch.device("cuda", 0)
MATMUL = 8192
MESSAGE_BYTES = 64 << 20
TIMEOUT = 580.0
MPS = "nvidia-cuda-mps-control"


class Size(msgspec.Struct, frozen=True):
    """A model, and the work of one step."""

    model: str = "gpt2"
    layers: int = 48
    width: int = 1600
    heads: int = 25
    tokens: int = 1024
    vocab: int = 50257
    microbatch: int = 8
    microbatches: int = 4
    steps: int = 20
    warmups: int = 3

    @property
    def batch(self) -> int:
        return self.microbatch * self.microbatches

    @property
    def suffix(self) -> str:
        """Return the suffix that marks a case of another model than the default."""
        usual = Size()
        same = (self.model, self.layers, self.width) == (usual.model, usual.layers, usual.width)
        return "" if same else f", {self.model} of {self.layers} layers, {self.width} wide"

    def flops(self, parameters: int) -> float:
        """Return the FLOPs of one step, forward and backward: products of the weights, and attention."""
        tokens = self.batch * self.tokens
        return 6.0 * parameters * tokens + 12.0 * self.layers * self.width * self.tokens * tokens


class Figure(msgspec.Struct, frozen=True):
    """A line of the table."""

    what: str
    against: str
    found: float
    ours: str
    other: str
    target: float | None = None
    at_least: bool = False

    @property
    def reached(self) -> bool | None:
        if self.target is None:
            return None
        return self.found >= self.target if self.at_least else self.found <= self.target


# ---------------------------------------------------------------- the model


def make_gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        n_positions=size.tokens,
        vocab_size=size.vocab,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_llama(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        intermediate_size=-(-size.width * 8 // 3 // 64) * 64,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.tokens,
        vocab_size=size.vocab,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[Size], nn.Module], tuple[str, ...]]] = {
    "gpt2": (make_gpt2, ("transformer.drop", "transformer.h.*")),
    "llama": (make_llama, ("model.rotary_emb", "model.layers.*")),
    **{name: (make, ()) for name, make in FAMILIES.items()},
}
"""With their cuts: before the first block too, so that all blocks are alike."""


def make_model(size: Size, device: str = str(DEVICE)) -> nn.Module:
    make, cuts = MODELS[size.model]
    with torch.device(device):
        model = make(size)
    if cuts:
        cut_after(model, *cuts)
    if device != "meta":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                fill(name, parameter)
    return model.train()


def fill(name: str, tensor: Tensor) -> None:
    """The same values on whichever stage a tensor is."""
    if name.endswith("bias"):
        tensor.zero_()
    elif "ln_" in name or "norm" in name:
        tensor.fill_(1.0)
    else:
        generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
        tensor.normal_(0.0, 0.02, generator=generator)


def make_batch(size: Size, samples: int) -> dict[str, Tensor]:
    if size.model in OF_IMAGES:
        return make_images(samples)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(size.vocab, (samples, size.tokens), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------- both sides


class Bare:
    """The loop that one writes by hand."""

    def __init__(self, size: Size, *, compiled: bool = False) -> None:
        self.size = size
        self.model = make_model(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.run: Callable[..., Any] = torch.compile(self.model) if compiled else self.model
        self.batch = {name: value.to(DEVICE) for name, value in make_batch(size, size.batch).items()}
        self.num_parameters = num_parameters(self.model)

    def step(self) -> float:
        total = torch.zeros((), device=DEVICE)
        for index in range(self.size.microbatches):
            part = slice(index * self.size.microbatch, (index + 1) * self.size.microbatch)
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.run(**{name: value[part] for name, value in self.batch.items()}).loss
            loss = loss / self.size.microbatches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


class Ours:
    def __init__(self, size: Size, *, depth: int = 1, **options: Any) -> None:
        model = make_model(size, str(DEVICE) if size.model in FAMILIES else "meta")
        self.num_parameters = num_parameters(model)
        stages = format_stage_map([[stage] for stage in range(depth)])
        self.model = Varuna(
            model,
            stages,
            make_batch(size, 2),
            size.batch,
            size.microbatch,
            device=DEVICE,
            precision="bf16",
            seed=1,
            from_cache=False,
            initialize=None if size.model in FAMILIES else fill,
            timeout_seconds=300,
            **options,
        )
        del model
        gc.collect()
        torch.cuda.empty_cache()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.model.set_optimizer(self.optimizer)
        self.batch = {name: value.to(DEVICE) for name, value in make_batch(size, size.batch).items()}

    def step(self) -> float:
        loss, _ = self.model.step(self.batch)
        self.optimizer.step()
        self.model.zero_grad()
        return loss


class Run(msgspec.Struct, frozen=True):
    seconds: list[float]  # of single steps, the device idle before and after each
    warm_seconds: float  # of all steps before
    peak_bytes: int
    reserved_bytes: int
    losses: list[float]
    num_parameters: int
    setup_seconds: float = 0.0
    busy_seconds: float = 0.0  # of one step: what the device's kernels take, one after the other

    @property
    def median(self) -> float:
        return median(self.seconds)

    def compile_seconds(self, warmups: int) -> float:
        return self.warm_seconds - warmups * self.median


def measure(size: Size, make: Callable[[], Bare | Ours], *, profiled: bool = False) -> Run:
    """Measure one side. The profiler makes all later launches of its process slower: use it for the last."""
    started = time.perf_counter()
    side = make()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    losses = [side.step() for _ in range(size.warmups)]
    torch.cuda.synchronize()
    warm = time.perf_counter() - ready
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(size.steps):
        start = time.perf_counter()
        losses.append(side.step())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    busy = busy_seconds(side.step) if profiled else 0.0
    found = Run(seconds, warm, peak, reserved, losses, side.num_parameters, ready - started, busy)
    del side
    gc.collect()
    torch.cuda.empty_cache()
    return found


def busy_seconds(step: Callable[[], float]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(row.self_device_time_total for row in profile.key_averages()) / 1e6


# ---------------------------------------------------------------- what workers do


def run_eager(size: Size) -> tuple[Run, Run]:
    return measure(size, lambda: Bare(size)), measure(size, lambda: Ours(size), profiled=True)


def run_compiled(size: Size, ours: bool) -> Run:
    make: Callable[[], Bare | Ours]
    make = partial(Ours, size, compile=True) if ours else partial(Bare, size, compiled=True)
    return measure(size, make, profiled=True)


def run_nothing() -> None:
    """Compiles next to nothing, so that the compiler's files are in memory for the first measurement."""
    double = torch.compile(lambda x: (x * 2).sum())
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    double(x).backward()
    torch.cuda.synchronize()


def run_replayed(size: Size, compiled: bool) -> tuple[Run, Run]:
    def make(replayed: bool) -> Callable[[], Ours]:
        return lambda: Ours(size, compile=compiled, cuda_graphs=replayed)

    return measure(size, make(True)), measure(size, make(False))


def run_with_state_on_host(size: Size) -> tuple[Run, Run]:
    return measure(size, lambda: Ours(size, offload_optimizer=True)), measure(size, lambda: Ours(size))


def matmul_ceiling() -> float:
    """TFLOP/s of a large bf16 product of random matrices: the best of runs that last long enough to count."""
    a, b = (torch.randn(MATMUL, MATMUL, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            a @ b
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / 50)
    return 2.0 * MATMUL**3 / min(seconds) / 1e12


class StageRun(msgspec.Struct, frozen=True):
    run: Run
    gradients: dict[str, float]  # the norm of each, before any update
    channels: dict[int, str]


def run_stage(size: Size, depth: int) -> StageRun:
    """One rank of a pipeline, all of whose ranks share the card."""
    side = Ours(size, depth=depth, schedule="1f1b")
    side.model.step(side.batch)
    gradients = {
        name: float(parameter.grad.double().norm())
        for name, parameter in side.model.named_parameters()
        if parameter.grad is not None
    }
    side.model.zero_grad()
    run = measure(size, lambda: side)
    channels = side.model.channels
    side.model.close()
    return StageRun(run, gradients, channels)


def run_beside(seconds: float) -> float:
    """Products a second of this process, while others do the same."""
    import torch.distributed as dist

    a = torch.randn(8192, 1600, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(1600, 6400, device=DEVICE, dtype=torch.bfloat16)

    def products(count: int) -> None:
        for _ in range(count):
            torch.nn.functional.gelu(a @ b)
        torch.cuda.synchronize()

    products(20)
    dist.barrier()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        products(200)
        count += 200
    return count / (time.perf_counter() - start)


def copy_rate() -> float:
    """Bytes a second of a copy within the device, counted once."""
    source = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            target.copy_(source)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / 20)
    return MESSAGE_BYTES / median(seconds)


def run_channel(messages: int = 32, rounds: int = 20) -> tuple[float, float, str]:
    """Bytes a second from rank 0 to rank 1, seconds there and back of a small one, and by which way."""
    import torch.distributed as dist

    rank = dist.get_rank()

    def exchange(own: object) -> list[object]:
        everyone: list[object] = [None, None]
        dist.all_gather_object(everyone, own)
        return everyone

    def take(count: int) -> None:
        taken = None
        for _ in range(count):
            while not link.ready:
                network.wait(60)
            taken = link.take()  # the last one goes, and its slot with it
        del taken

    payload = torch.ones(MESSAGE_BYTES, dtype=torch.uint8, device=DEVICE)
    small = torch.ones(1024, device=DEVICE)
    with connect(rank, {1 - rank: "the other"}, exchange, device=DEVICE) as network:
        (link,) = network.links.values()
        seconds, there_and_back = [], []
        for number in range(rounds + 3):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            if rank == 0:
                for _ in range(messages):
                    link.send([payload])
                take(1)
            else:
                take(messages)
                torch.cuda.synchronize()
                link.send([])
            if number >= 3:
                seconds.append(time.perf_counter() - start)
        for number in range(rounds + 3):
            start = time.perf_counter()
            for _ in range(10):
                if rank == 0:
                    link.send([small])
                    take(1)
                else:
                    take(1)
                    link.send([small])
            torch.cuda.synchronize()
            if number >= 3:
                there_and_back.append((time.perf_counter() - start) / 10)
        dist.barrier()
        return messages * MESSAGE_BYTES / median(seconds), median(there_and_back), link.transport


class Predicted(msgspec.Struct, frozen=True):
    microbatch: int
    seconds: float
    predicted_seconds: float
    peak_bytes: int
    predicted_bytes: int


def run_profile(size: Size, microbatches: Sequence[int]) -> tuple[float, list[Predicted]]:
    """Time a profile, and compare its predictions with steps at several micro-batch sizes."""
    started = time.perf_counter()
    profiler = Profiler(
        make_model(size),
        lambda samples: make_batch(size, samples),
        device="cuda:0",
        precision="bf16",
        out_folder=tempfile.mkdtemp(prefix="varuna-bench-"),
    )
    profiler.set_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True))
    profile = profiler.profile_all(microbatches)
    took = time.perf_counter() - started
    del profiler
    gc.collect()
    torch.cuda.empty_cache()
    cluster = Cluster((Machine("here", 1, profile.device_memory_bytes),))
    found = []
    for microbatch in microbatches:
        at = msgspec.structs.replace(size, microbatch=microbatch, microbatches=size.batch // microbatch)
        plans = []

        def make() -> Ours:
            side = Ours(at)  # noqa: B023 - called at once
            plans.append(side.model.plan)  # noqa: B023
            return side

        run = measure(at, make)
        forecast, _ = forecast_plan(profile, cluster, plans[0])
        memory = forecast.stages[0].memory
        found.append(
            Predicted(microbatch, run.median, forecast.seconds, run.peak_bytes, memory.total - memory.fixed)
        )
    return took, found


# ---------------------------------------------------------------- the cases


@contextmanager
def fresh(cache: str | None = None) -> Iterator[Pool]:
    """Processes of their own; `cache` is where the compiler keeps what it has made."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TRITON_CACHE_DIR"] = f"{cache}/triton"
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()
        if before is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
            os.environ.pop("TRITON_CACHE_DIR", None)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def against(what: str, other: str, ours: float, theirs: float, unit: str, **target: Any) -> Figure:
    return Figure(what, other, ours / theirs, f"{ours:.4g} {unit}", f"{theirs:.4g} {unit}", **target)


def one_process(size: Size) -> Iterator[Figure]:
    with fresh() as pool:
        bare, ours = pool.run(run_eager, 1, size, timeout=TIMEOUT)[0]
    what = f"step, P=1, eager, {size.microbatches} × {size.microbatch} samples"
    yield against(what, "bare loop", ours.median, bare.median, "s", target=1.01)
    yield memories("peak memory, P=1, eager", "bare loop", ours, bare, target=1.03)
    yield fragments("eager", "bare loop", ours, bare)
    yield idle("eager", ours)
    yield difference_of_losses("", "bare loop", ours, bare)


def trainer(size: Size) -> Iterator[Figure]:
    """VarunaTrainer against transformers.Trainer, in turn, each in fresh processes."""
    layers, width, updates = 12, 1024, 20
    sides: dict[str, list[float]] = {"varuna": [], "transformers": []}
    for _ in range(2):
        for kind, times in sides.items():
            with fresh() as pool:
                times += pool.run(seconds_per_update, 1, kind, updates, layers, width, 1, True)[0]
    ours, other = (median(times) for times in sides.values())
    what = f"update of VarunaTrainer, Llama, {layers} layers, {width} wide"
    yield against(what, "transformers.Trainer", ours, other, "s", target=1.02)


def compiling(size: Size) -> Iterator[Figure]:
    cache = tempfile.mkdtemp(prefix="varuna-bench-")
    few = msgspec.structs.replace(size, steps=3)
    try:
        with fresh(f"{cache}/nothing") as pool:
            ceiling = pool.run(matmul_ceiling, 1)[0]
            pool.run(run_nothing, 1)
        with fresh(f"{cache}/ours") as pool:
            ours = pool.run(run_compiled, 1, size, True, timeout=TIMEOUT)[0]
        with fresh(f"{cache}/ours") as pool:
            again = pool.run(run_compiled, 1, few, True, timeout=TIMEOUT)[0]
        yield use_of_the_card("compiled", size, ours, ceiling)
        yield idle("compiled", ours)
        with fresh(f"{cache}/bare") as pool:
            bare = pool.run(run_compiled, 1, size, False, timeout=TIMEOUT)[0]
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    start, restart, whole = (run.compile_seconds(size.warmups) for run in (ours, again, bare))
    yield against("step, P=1, compiled", "bare loop, compiled", ours.median, bare.median, "s", target=1.02)
    yield against("compiling, first start", "the whole model", start, whole, "s", target=0.2)
    yield against("compiling, restart", "the whole model", restart, whole, "s", target=0.05)
    yield memories("peak memory, compiled", "bare loop, compiled", ours, bare, target=1.03)
    yield fragments("compiled", "bare loop, compiled", ours, bare)
    yield use_of_the_card("bare loop, compiled", size, bare, ceiling)


def cuda_graphs(size: Size) -> Iterator[Figure]:
    """Measure CUDA graphs with the chosen model, compiled, and with a model of very short kernels."""
    small = msgspec.structs.replace(size, layers=12, width=768, heads=12, microbatch=1)
    cache = tempfile.mkdtemp(prefix="varuna-bench-")
    try:
        for at, compiled in ((small, False), (small, True), (size, True)):
            with fresh(cache) as pool:
                replayed, usual = pool.run(run_replayed, 1, at, compiled, timeout=TIMEOUT)[0]
            how = "compiled" if compiled else "eager"
            what = f"{how}, {at.layers} layers, {at.width} wide, m={at.microbatch}"
            yield against(f"step with CUDA graphs, {what}", "without", replayed.median, usual.median, "s")
            found = replayed.reserved_bytes, usual.reserved_bytes
            yield Figure(f"memory taken, {what}", "without", found[0] / found[1], *map(gib, found))
            yield difference_of_losses(f", {what}", "without", replayed, usual)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def larger_microbatches(size: Size) -> Iterator[Figure]:
    """The same batch in fewer micro-batches, as far as memory goes: what the card is used for then."""
    with fresh() as pool:
        ceiling = pool.run(matmul_ceiling, 1)[0]
    for factor in (2, 4):
        if size.microbatches % factor == 0:
            at = msgspec.structs.replace(
                size, microbatch=size.microbatch * factor, microbatches=size.microbatches // factor
            )
            with fresh() as pool:
                run = pool.run(run_compiled, 1, at, True, timeout=TIMEOUT)[0]
            yield use_of_the_card(f"compiled, {at.microbatches} × {at.microbatch} samples", at, run, ceiling)


def use_of_the_card(what: str, size: Size, run: Run, ceiling: float) -> Figure:
    rate = size.flops(run.num_parameters) / 1e12 / run.median
    return Figure(
        f"use of the card, {what}",
        f"{ceiling:.0f} TFLOP/s of a matrix product",
        rate / ceiling,
        f"{rate:.0f} TFLOP/s",
        gib(run.peak_bytes),
        target=0.54,
        at_least=True,
    )


def idle(what: str, run: Run) -> Figure:
    """The most that CUDA graphs could win."""
    share = 1 - run.busy_seconds / run.median
    return Figure(
        f"device idle in a step, {what}", "", share, f"{share:.1%}", f"{run.busy_seconds:.4g} s busy"
    )


def memories(what: str, other: str, ours: Run, theirs: Run, **target: Any) -> Figure:
    found = ours.peak_bytes, theirs.peak_bytes
    return Figure(what, other, found[0] / found[1], *map(gib, found), **target)


def difference_of_losses(what: str, other: str, ours: Run, theirs: Run) -> Figure:
    found = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    last = f"{ours.losses[-1]:.5f}", f"{theirs.losses[-1]:.5f}"
    return Figure(f"largest difference of losses{what}", other, found, *last)


def fragments(what: str, other: str, ours: Run, theirs: Run) -> Figure:
    """Memory that torch has taken from the card and could not use."""
    found = [run.reserved_bytes - run.peak_bytes for run in (ours, theirs)]
    share = found[0] / ours.peak_bytes
    return Figure(f"fragments, as a share of the peak, {what}", other, share, *map(gib, found))


def host_state(size: Size) -> Iterator[Figure]:
    short = msgspec.structs.replace(size, steps=max(3, size.steps // 3))
    with fresh() as pool:
        ours, usual = pool.run(run_with_state_on_host, 1, short, timeout=TIMEOUT)[0]
    yield against("step, optimizer's state on the host", "on the card", ours.median, usual.median, "s")
    yield memories("peak memory, optimizer's state on the host", "on the card", ours, usual)
    same = float(ours.losses == usual.losses)
    yield Figure(
        "losses equal to the bit, state on the host", "on the card", same, "", "", target=1, at_least=True
    )


def stages(size: Size) -> Iterator[Figure]:
    """On one card, which holds the activations of all stages at once: so smaller micro-batches."""
    microbatch = max(1, size.microbatch // 2)
    half = msgspec.structs.replace(size, microbatch=microbatch, microbatches=size.batch // microbatch)
    with fresh() as pool:
        (whole,) = pool.run(run_stage, 1, half, 1, timeout=TIMEOUT)
        alone = pool.run(run_beside, 1, 2.0)[0]
    for depth in (2, 4):
        with fresh() as pool:
            found = pool.run(run_stage, depth, half, depth, timeout=TIMEOUT)
            rates = pool.run(run_beside, depth, 4.0)
        what = f"step, {depth} stages on one card, {half.microbatches} × {half.microbatch} samples, 1f1b"
        yield against(what, "P=1", seconds_of_all(found), whole.run.median, "s", target=1.3)
        yield Figure(
            f"of that: {depth} processes taking turns on the card, without messages",
            "one process",
            alone / sum(rates),
            f"{sum(rates):.0f} products/s",
            f"{alone:.0f} products/s",
        )
        differences = [
            abs(norm - whole.gradients[name]) / (whole.gradients[name] or 1.0)
            for each in found
            for name, norm in each.gradients.items()
        ]
        ways = {way for each in found for way in each.channels.values()}
        yield Figure(
            f"largest difference of a gradient's norm, {depth} stages",
            "P=1",
            max(differences),
            f"{len(differences)} gradients",
            ", ".join(sorted(ways)),
            target=2e-3,
        )
        peak = sum(each.run.peak_bytes for each in found)
        what = f"peak memory, {depth} stages together"
        yield Figure(what, "P=1", peak / whole.run.peak_bytes, gib(peak), gib(whole.run.peak_bytes))
    if shutil.which(MPS):
        with sharing_the_card(), fresh() as pool:
            found = pool.run(run_stage, depth, half, depth, timeout=TIMEOUT)
        what = f"step, {depth} stages on one card at the same time (MPS)"
        yield against(what, "P=1", seconds_of_all(found), whole.run.median, "s", target=1.3)


def seconds_of_all(found: Sequence[StageRun]) -> float:
    """Return the seconds of a step: those of the slowest stage."""
    return median(max(times) for times in zip(*(each.run.seconds for each in found), strict=True))


@contextmanager
def sharing_the_card() -> Iterator[None]:
    """By a daemon of our own, so that processes need not take turns."""
    folders = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}
    with tempfile.TemporaryDirectory(prefix="varuna-mps-", ignore_cleanup_errors=True) as home:
        for variable, name in folders.items():
            os.environ[variable] = f"{home}/{name}"
            os.mkdir(f"{home}/{name}")
        try:
            subprocess.run([MPS, "-d"], check=True)
            yield
        finally:
            subprocess.run([MPS], input=b"quit\n", timeout=60, check=False)
            for variable in folders:
                del os.environ[variable]


def channels(size: Size) -> Iterator[Figure]:
    with fresh() as pool:
        rate, small, way = pool.run(run_channel, 2)[0]
        copy = pool.run(copy_rate, 1)[0]
    yield Figure(
        f"channel, messages of {MESSAGE_BYTES >> 20} MiB, {way}",
        "copy within the device",
        rate / copy,
        f"{rate / 1e9:.0f} GB/s",
        f"{copy / 1e9:.0f} GB/s",
        target=0.5,
        at_least=True,
    )
    yield Figure("channel, 4 KiB there and back", "", small, f"{small * 1e6:.0f} µs", "")


def predictions(size: Size) -> Iterator[Figure]:
    sizes = sorted({max(1, size.microbatch // 4), max(1, size.microbatch // 2), size.microbatch})
    short = msgspec.structs.replace(size, steps=max(3, size.steps // 2))
    with fresh() as pool:
        took, found = pool.run(run_profile, 1, short, sizes, timeout=TIMEOUT)[0]
    yield Figure("a profile at so many sizes", f"{len(sizes)} sizes", took, f"{took:.0f} s", "")
    for each in found:
        off = abs(each.predicted_seconds / each.seconds - 1)
        yield Figure(
            f"step time, predicted, m={each.microbatch}",
            "measured, P=1",
            off,
            f"{each.predicted_seconds:.4g} s",
            f"{each.seconds:.4g} s",
            target=0.05,
        )
        off = abs(each.predicted_bytes / each.peak_bytes - 1)
        yield Figure(
            f"peak memory, predicted, m={each.microbatch}",
            "the allocator's",
            off,
            gib(each.predicted_bytes),
            gib(each.peak_bytes),
            target=0.1,
        )


CASES: dict[str, Callable[[Size], Iterator[Figure]]] = {
    "channels": channels,
    "one-process": one_process,
    "trainer": trainer,
    "predictions": predictions,
    "stages": stages,
    "host-state": host_state,
    "compiling": compiling,
    "larger-microbatches": larger_microbatches,
    "cuda-graphs": cuda_graphs,
}


# ---------------------------------------------------------------- the report


def machine() -> str:
    memory = gib(torch.cuda.get_device_properties(DEVICE).total_memory)
    name = torch.cuda.get_device_name(DEVICE)
    return f"{name}, {memory}, torch {torch.__version__}, {os.cpu_count()} cores"


class Case(msgspec.Struct, frozen=True):
    size: Size
    figures: list[Figure]


class Report(msgspec.Struct, frozen=True):
    machine: str
    cases: dict[str, Case]


def table(report: Report) -> str:
    lines = [
        f"# On a GPU: {report.machine}",
        "",
        "Models of Hugging Face in bf16 autocast with fused AdamW, written by `python -m benchmarks.gpu`. "
        "Times are medians of single steps, the card idle before and after each.",
    ]
    for name, case in report.cases.items():
        size = case.size
        lines += [
            "",
            f"## {name}",
            "",
            f"{size.model}: {size.layers} layers, {size.width} wide, {size.tokens} tokens, "
            f"{size.microbatches} micro-batches of {size.microbatch}, "
            f"{size.steps} steps after {size.warmups}.",
            "",
            "| what | against | found | ours | other | to reach | reached |",
            "|---|---|---|---|---|---|---|",
            *map(row, case.figures),
        ]
    return "\n".join([*lines, ""])


def row(figure: Figure) -> str:
    sign = "≥" if figure.at_least else "≤"
    target = "" if figure.target is None else f"{sign} {figure.target:g}"
    reached = {True: "yes", False: "NO", None: ""}[figure.reached]
    cells = [figure.what, figure.against, f"{figure.found:.4g}", figure.ours, figure.other, target, reached]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of: {', '.join(CASES)} (default: all)"
    )
    for name, default in msgspec.structs.asdict(Size()).items():
        known = list(MODELS) if name == "model" else None
        parser.add_argument(
            f"--{name}", type=type(default), choices=known, default=default, help=f"default: {default}"
        )
    parser.add_argument("--into", type=Path, default=HOME, help="folder for gpu.md and results/gpu.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU on this machine")
    if unknown := sorted(set(arguments.names) - set(CASES)):
        parser.error(f"no case is called {', '.join(unknown)} (there are {', '.join(CASES)})")
    size = Size(**{name: getattr(arguments, name) for name in Size.__struct_fields__})
    path = arguments.into / "results" / "gpu.json"
    report = Report(machine(), {})
    if path.is_file():
        known = msgspec.json.decode(path.read_bytes(), type=Report)
        if known.machine == report.machine:  # a case that ran before is replaced, the others stay
            of_today = {name: case for name, case in known.cases.items() if name.split(",")[0] in CASES}
            report.cases.update(of_today)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        if arguments.names and name not in arguments.names:
            continue
        started = time.perf_counter()
        found = report.cases[name + size.suffix] = Case(size, [])
        for figure in case(size):
            found.figures.append(figure)
            path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
            (arguments.into / "gpu.md").write_text(table(report))
            print(row(figure), flush=True)
        print(f"--- {name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    # Under its own name, by which the workers find what they are to run.
    from benchmarks.gpu import main as under_its_name

    under_its_name()
