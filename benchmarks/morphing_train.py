"""Training script of the benchmark `morphing`, run by `varuna run`, by torchrun and with torchft.

Every rank notes when it begins, and the first one when a step is done, in the file `notes.jsonl`. Model,
data, batch, optimizer and the steps between two checkpoints are the same on both sides. Under torchrun
(--plain) it uses the fastest alternative: DistributedDataParallel and torch.save, without importing this
library, because the import would cost time at each restart.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH, WIDTH = 12, 64
SAVE_EVERY = 25
STEP_SECONDS = 0.02
PEER_SECONDS = 2.0
"""After so long in vain a worker of torchrun gives up on its peers: nobody else tells it of a silent one."""


class Notes:
    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.same = {"world": world, "start": time.time()}
        self.write("begun", rank=rank, pid=os.getpid(), host=socket.gethostname())

    def write(self, what: str, **facts: object) -> None:
        line = {"at": time.time(), "what": what, **self.same, **facts}
        with open("notes.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def stepped(self, step: int, world: int) -> None:
        if os.environ["RANK"] == "0":  # a morph in place changes it
            self.write("step", step=step, world=world)


def samples(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)[rank::world]
    return inputs, inputs.sum(1, keepdim=True)


def train_with_library() -> None:
    from varuna import CutPoint, Varuna

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cut, self.last = nn.Linear(WIDTH, WIDTH), CutPoint(), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ((self.last(self.cut(torch.tanh(self.first(x)))) - y) ** 2).mean()

    notes = Notes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    x, y = samples(0, 0, 1)
    torch.manual_seed(1)
    stage_map = os.environ["VARUNA_STAGE_TO_RANK_MAP"]
    model = Varuna(Net(), stage_map, {"x": x, "y": y}, BATCH, 2, device="cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.set_optimizer(optimizer)
    before = time.time()
    model.resume("store")
    notes.write("loaded", seconds=time.time() - before)

    def fetch(places: Sequence[int]) -> dict[str, Tensor]:
        step = places[0] // BATCH
        inputs, targets = samples(step, 0, 1)
        rows = [place - step * BATCH for place in places]
        return {"x": inputs[rows], "y": targets[rows]}

    while True:
        step = model.iteration
        x, y = samples(step, model.rank_within_stage, model.data_depth)
        model.step(fetch if "--fetch" in sys.argv else {"x": x, "y": y})
        optimizer.step()
        model.zero_grad()
        notes.stepped(step, model.data_depth)
        if model.iteration % SAVE_EVERY == 0:
            before = time.time()
            model.checkpoint("store", keep_last=2)
            notes.write("saved", seconds=time.time() - before)
        time.sleep(STEP_SECONDS)


def train_plainly() -> None:
    # Workers begin seconds apart; once all are there, a silent one is given up soon.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    notes = Notes(rank, world)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    step, place = 0, Path("checkpoint.pt")
    if place.exists():
        kept = torch.load(place)
        net.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    model = DistributedDataParallel(
        net, process_group=dist.new_group(timeout=timedelta(seconds=PEER_SECONDS))
    )
    while True:
        x, y = samples(step, rank, world)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.stepped(step, world)
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            kept = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(kept, "checkpoint.part")
            os.replace("checkpoint.part", place)
        time.sleep(STEP_SECONDS)


def train_with_torchft() -> None:
    """One replica: it joins the others, and goes on without those that are lost."""
    sys.path.append(os.environ["TORCHFT_PACKAGES"])
    from torchft import DistributedDataParallel as ReplicatedModel
    from torchft import Manager, Optimizer, ProcessGroupGloo

    os.environ.update(RANK="0", WORLD_SIZE="1")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # noqa: F841  # it lives as long as the worker
        address, port, is_master=True, wait_for_workers=False
    )
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    inner = torch.optim.Adam(net.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    seconds = timedelta(seconds=PEER_SECONDS)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=seconds,
        connect_timeout=seconds,
        quorum_timeout=timedelta(seconds=60),
        heartbeat_interval=timedelta(milliseconds=100),
        replica_id=socket.gethostname(),
        hostname=address,
    )
    model, optimizer = ReplicatedModel(manager, net), Optimizer(manager, inner)
    notes = Notes(0, 0)
    while True:
        optimizer.zero_grad()
        step, rank, world = manager.current_step(), manager.participating_rank(), manager.num_participants()
        x, y = samples(step, rank or 0, world)
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        if rank == 0 and manager.current_step() > step:  # else the step was dropped
            notes.write("step", step=step, world=world)
        time.sleep(STEP_SECONDS)


if __name__ == "__main__":
    if "--torchft" in sys.argv:
        train_with_torchft()
    elif "--plain" in sys.argv:
        train_plainly()
    else:
        train_with_library()
