"""Tensors as bytes and back, without a copy where there need not be one."""

import ctypes

import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import TensorEntry
from varuna.checkpoint.format.part import Spec


def spec_of(key: str, tensor: Tensor) -> Spec:
    return Spec(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def check_dense(key: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"{key} is a {tensor.layout} tensor of {tensor.dtype}; only dense tensors can be saved"
        )


def as_plain(key: str, tensor: Tensor) -> Tensor:
    """Dense, contiguous, on the CPU; the very same tensor where it is that already."""
    check_dense(key, tensor)
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a plain tensor; the caller keeps the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def tensor_from(buffer: memoryview, entry: TensorEntry | Spec) -> Tensor:
    """A tensor of its own with these bytes."""
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    memory_of(tensor)[:] = buffer
    return tensor


@torch.no_grad()
def fill(tensor: Tensor, buffer: memoryview, entry: TensorEntry | Spec) -> None:
    """Gives a tensor these bytes' values, with one copy where it lies on the CPU in the same form."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and spec_of("", tensor).dtype == entry.dtype:
        memory_of(tensor.detach())[:] = buffer
    else:
        tensor.copy_(tensor_from(buffer, entry))
