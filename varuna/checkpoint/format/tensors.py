"""Conversion between tensors and bytes, without a copy if possible."""

import ctypes

import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import TensorEntry
from varuna.checkpoint.format.part import FileTensor


def spec_of(key: str, tensor: Tensor) -> FileTensor:
    return FileTensor(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def check_dense(key: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"{key} is a {tensor.layout} tensor of {tensor.dtype}; checkpoints hold only dense tensors"
        )


def as_plain(key: str, tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and on the CPU; without a copy if it already is."""
    check_dense(key, tensor)
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a plain tensor. The caller must keep the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def tensor_from(buffer: memoryview, entry: TensorEntry | FileTensor) -> Tensor:
    """Return a new tensor with these bytes."""
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    memory_of(tensor)[:] = buffer
    return tensor


@torch.no_grad()
def fill(tensor: Tensor, buffer: memoryview, entry: TensorEntry | FileTensor) -> None:
    """Set a tensor's values from these bytes, with a single copy if it is contiguous on the CPU."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and spec_of("", tensor).dtype == entry.dtype:
        memory_of(tensor.detach())[:] = buffer
    else:
        tensor.copy_(tensor_from(buffer, entry))
