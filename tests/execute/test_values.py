"""Messages between ranks: typed values, tensors, and nothing that runs code."""

import enum
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from varuna.errors import WorkerError
from varuna.execute.comm import values
from varuna.execute.comm.collective import FIRST_BYTES, Collective
from varuna.execute.comm.frames import DTYPES
from varuna.execute.comm.values import PlainValue
from varuna.types import Plan, StagePlan


def sent(value: Any, kind: Any) -> Any:
    return values.decode(values.encode(value), kind, "the message of rank 3")


class Color(enum.IntEnum):
    RED = 3


class Pair(NamedTuple):
    name: str
    value: Tensor | None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None),
        (2**64 - 1, int),
        (float("inf"), float),
        ("é", str),
        (("a", (1, 2.5)), tuple[str, tuple[int, float]]),
        ({3: 0.5}, dict[int, float]),
        (frozenset({"a", "b"}), frozenset[str]),
        (OrderedDict(a=1), dict[str, int]),
        (Color.RED, int),
        (np.float32(0.5), float),
        (np.int64(7), int),
        (torch.Size([2, 3]), torch.Size),
        (torch.Size([2, 3]), tuple[int, ...]),
        (torch.bfloat16, torch.dtype),
        (torch.device("cuda:1"), torch.device),
        (Plan((StagePlan(0, 2, (0, 1)),), 8, 2), Plan),
        (None, Plan | None),
    ],
)
def test_typed_values_arrive_as_they_were(value: Any, kind: Any) -> None:
    found = sent(value, kind)
    assert found == value


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_of_every_dtype_and_layout_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    flat = torch.randint(0, 2 if dtype is torch.bool else 100, (24 * dtype.itemsize,)).to(torch.uint8)
    tensor = flat.view(dtype).view(4, 6) if dtype is not torch.bool else flat.bool().view(4, 6)
    for own in (tensor, tensor.t(), tensor[1:, ::2], tensor[0, 0], tensor[:0]):
        found = sent({"a": own, "b": torch.ones(3)}, dict[str, Tensor])
        assert found["a"].dtype == dtype and found["a"].shape == own.shape
        assert bytes(values.memory_of(found["a"])) == bytes(values.memory_of(own.contiguous()))
        assert torch.equal(found["b"], torch.ones(3))


def test_a_tensor_has_memory_of_its_own_and_is_found_in_any_place() -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))
    found = sent([Pair("w", weight), Pair("none", None), Pair("c", torch.tensor(1j).conj())], list[Pair])
    assert torch.equal(found[0].value, weight.detach()) and not found[0].value.requires_grad
    assert found[0].value.untyped_storage().nbytes() == 12
    assert found[1].value is None and found[2].value == torch.tensor(-1j)


def test_values_of_scripts_keep_their_containers() -> None:
    """The state of an optimizer: tuples stay tuples, and keys of dicts stay ints."""
    value = {
        "step": torch.tensor(3.0),
        "betas": (0.9, [None, True, b"x", "y"], {3: {4}, "f": frozenset({5})}),
        "large": 2**100,
        "numpy": (np.float32(2.5), np.int8(-3)),
        "complex": 1j,
        "dtype": torch.float8_e4m3fn,
        "size": torch.Size([1]),
        "device": torch.device("cpu"),
    }
    found = sent(PlainValue(value), PlainValue).value
    assert found.pop("step") == value.pop("step")
    assert found == value
    assert type(found["numpy"][0]) is np.float32 and type(found["betas"]) is tuple
    array = np.arange(6.0).reshape(2, 3)[:, ::2]
    assert np.array_equal(sent(PlainValue([array]), PlainValue).value[0], array)


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.path,)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (Bomb("x"), r"the Bomb <.*> cannot be sent to other ranks \(send plain values: None, bool, int"),
        (PlainValue({"exp_avg": [0, Bomb("x")]}), r"the Bomb .* at \['exp_avg'\]\[1\] cannot be sent"),
        (PlainValue(np.array([Bomb("x")])), r"the ndarray (.|\n)* cannot be sent"),
        (2**70, "the int 1180591620717411303424 cannot be sent"),
        (PlainValue(nested(200)), "more than 100 levels cannot be sent"),
        (torch.eye(2).to_sparse(), r"a torch.sparse_coo tensor .* \(make it dense"),
        (torch.empty(2, device="meta"), "on meta cannot be sent"),
    ],
)
def test_other_values_are_refused_where_they_are_sent(value: Any, error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        values.encode(value)


def as_message(head: Any) -> bytes:
    packed = values.msgspec.msgpack.encode(head)
    return len(packed).to_bytes(8, "little") + packed


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", int),
        (b"\0" * 7, int),
        (b"\xff" * 100, int),
        (pickle.dumps({"a": 1}), dict[str, int]),
        (as_message("1"), int),
        (as_message({"a": 1}), Plan),
        (as_message(["float32", [2**40], 0]), Tensor),
        (as_message(["float32", [-1], 0]), Tensor),
        (as_message(["float32", [0], -16]), Tensor),
        (as_message(["system", [0], 0]), Tensor),
        (as_message(["float32", [0]]), Tensor),
        (as_message("os"), torch.dtype),
        (as_message(["array", "O", [1], bytes(8)]), PlainValue),
        (as_message(["array", "f8", [2], bytes(8)]), PlainValue),
        (as_message(["call", "os.system", "true"]), PlainValue),
        (as_message({"a": 1}), PlainValue),
    ],
)
def test_what_is_not_of_the_type_is_refused(data: bytes, kind: Any) -> None:
    """SEC-1: the error names the rank, and nothing else happens."""
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    with pytest.raises(ValueError, match="the message of rank 3 is not a valid"):
        values.decode(message, kind, "the message of rank 3")


def meet_a_stranger(path: str) -> str:
    """Rank 1 speaks for a stranger that has joined the group: it sends pickles with code."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 0:
        ranks, errors = Collective(0, (0, 1), group), []
        for receive in (
            lambda: ranks.gather(0, int),
            lambda: ranks.gather(PlainValue(0), PlainValue),
            lambda: ranks.broadcast(0, 1, int),
            lambda: ranks.gather(0, int),
        ):
            with pytest.raises(WorkerError) as raised:
                receive()  # type: ignore[no-untyped-call]
            errors.append(str(raised.value))
        return "\n".join(errors)
    bomb = torch.frombuffer(bytearray(pickle.dumps(Bomb(path))), dtype=torch.uint8)
    for kind in "gather", "gather", "broadcast", "size":
        size = {"broadcast": len(bomb), "gather": len(bomb), "size": -5}[kind]
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        first[:8].view(torch.int64)[0] = size
        first[8 : 8 + len(bomb)] = bomb
        if kind == "broadcast":
            sizes = torch.tensor([float(size)], dtype=torch.float64)
            dist.all_gather([torch.empty_like(sizes) for _ in range(2)], sizes)
            dist.broadcast(bomb, 1)
        else:
            dist.all_gather([torch.empty_like(first) for _ in range(2)], first)
    return ""


def test_a_pickle_in_place_of_a_message_runs_nothing_and_names_the_rank(pool: Pool, tmp_path: Path) -> None:
    """SEC-1"""
    errors = pool.run(meet_a_stranger, 2, str(tmp_path / "ran"))[0].splitlines()
    assert not (tmp_path / "ran").exists()
    assert len(errors) == 4
    for error in errors[:3]:
        assert error.startswith("the message of rank 1 is not a valid ")
        assert "otherwise rank 1 is not a process of this job" in error
    assert errors[3].startswith("rank 1 announced a message of -5 bytes")


def gather_large(size: int) -> list[int]:
    ranks = Collective(dist.get_rank(), range(dist.get_world_size()), dist.group.WORLD)
    own = b"x" * (size * ranks.rank)
    return [len(found) for found in ranks.gather(own, bytes)]


@pytest.mark.parametrize("size", [0, 1, FIRST_BYTES // 2, FIRST_BYTES - 30, FIRST_BYTES, 100_000])
def test_a_gather_works_around_the_size_of_its_first_message(pool: Pool, size: int) -> None:
    assert pool.run(gather_large, 3, size) == [[0, size, 2 * size]] * 3
