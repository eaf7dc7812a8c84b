"""Small programs that `varuna doctor` runs on GPUs: ranks form an NCCL group, or share GPU memory.

    nccl SIZE               start SIZE ranks, each with its own GPU
    rank RANK SIZE FILE     one of them
    share                   receive a tensor through shared memory of the first GPU
    send                    the process that sends it

They run in processes of their own, because a broken driver may hang or end them.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

MODULE = "varuna.cli.doctor.gpu_ranks"


def main() -> None:
    name, *arguments = sys.argv[1:]
    if name == "nccl":
        start_ranks(int(arguments[0]))
    elif name == "rank":
        join_group(int(arguments[0]), int(arguments[1]), arguments[2])
    elif name == "share":
        receive()
    else:
        send(sys.stdin.buffer, sys.stdout.buffer)


def start_ranks(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen([sys.executable, "-m", MODULE, "rank", str(rank), str(size), store])
            for rank in range(size)
        ]
        failed = [rank for rank, process in enumerate(ranks) if process.wait()]
    if failed:
        sys.exit(1)  # the last line of stderr is that of a rank


def join_group(rank: int, size: int, store: str) -> None:
    """Sum a number over all ranks."""
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, size), rank=rank, world_size=size)
    number = torch.ones(1, device="cuda")
    dist.all_reduce(number)
    assert number.item() == size, f"a sum over {size} ranks is {number.item()}"
    dist.destroy_process_group()


def receive() -> None:
    """Let another process write into memory of this one, as the stages of a job do."""
    import torch

    from varuna.execute.comm.frames import TensorMeta
    from varuna.execute.comm.slots import SlotReceiver, device_uuid

    device = torch.device("cuda", 0)
    receiver = SlotReceiver(device)
    offer = receiver.offer(16, device_uuid(device))
    if offer is None:
        sys.exit("the memory of this GPU cannot be shared")
    other = subprocess.Popen(
        [sys.executable, "-m", MODULE, "send"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None and other.stdout is not None
    other.stdin.write(offer.hex().encode() + b"\n")
    other.stdin.flush()
    answer = other.stdout.readline().decode()
    if not answer:
        sys.exit(1)  # its error is on stderr
    receiver.accepted(0, bytes.fromhex(answer))
    (found,) = receiver.tensors(0, [TensorMeta(torch.float32, (4,), 16)])
    total = found.sum().item()
    other.stdin.close()  # it may end
    assert total == 4, f"four ones of another process add up to {total}"
    sys.exit(other.wait())


def send(offers: IO[bytes], answers: IO[bytes]) -> None:
    import torch

    from varuna.execute.comm.slots import SlotSender

    device = torch.device("cuda", 0)
    sender = SlotSender(device)
    accepted = sender.accept(bytes.fromhex(offers.readline().decode()))
    if accepted is None:
        sys.exit("the memory of another process cannot be opened")
    sender.put([torch.ones(4, device=device)])
    torch.cuda.synchronize(device)
    answers.write(accepted[1].hex().encode() + b"\n")
    answers.flush()
    offers.read()  # until the other process has read its memory
    sender.close()


if __name__ == "__main__":
    main()
