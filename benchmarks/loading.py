"""Peak memory of a rank that fills its stage of a model on `meta` from a Hugging Face folder."""

import ctypes
import gc
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from varuna import Varuna, cut_after
from varuna.hf import empty_model, hf_weights
from varuna.types import format_stage_map

TOKENS = 8


class LoadingPeak(msgspec.Struct, frozen=True):
    """One rank: the growth of its resident memory while it was wrapped, and the bytes of its stage."""

    grown: int
    stage: int


def write_model(folder: Path, width: int) -> None:
    """Save a Llama of 16 layers in shards, as transformers does."""
    import transformers as hf

    heads: dict[str, Any] = {"num_hidden_layers": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": width, "intermediate_size": 4 * width}
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(max_position_embeddings=TOKENS, **sizes, **heads))
    model.save_pretrained(folder, max_shard_size="40MB")


def wrap(folder: Path, depth: int) -> Varuna:
    model = empty_model(folder)
    cut_after(model, "model.layers.*")
    tokens = torch.zeros(2, TOKENS, dtype=torch.int64)
    sample = {"input_ids": tokens, "labels": tokens}
    stages = format_stage_map([[rank] for rank in range(depth)])
    return Varuna(model, stages, sample, 2, 1, device="cpu", seed=1, initialize=hf_weights(folder))


def peak_of_loading(tiny: str, large: str, depth: int) -> LoadingPeak:
    """Wrap a tiny model, so that all libraries are loaded, then measure the large one."""
    wrap(Path(tiny), depth).close()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    model = wrap(Path(large), depth)
    grown = _status("VmHWM") - before
    stage = sum(p.numel() * p.element_size() for p in model.parameters())
    model.close()
    return LoadingPeak(grown, stage)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def loading_peaks(run: Any, *, quick: bool) -> list[LoadingPeak]:
    """Return the peak of the rank that needs most for its stage, of 4, for each size of the model."""
    depth = 2 if quick else 4
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny"
        write_model(tiny, 16)
        for width in (64,) if quick else (448, 1280):
            large = Path(folder) / str(width)
            write_model(large, width)
            found: list[LoadingPeak] = run(peak_of_loading, depth, str(tiny), str(large), depth)
            peaks.append(max(found, key=lambda peak: peak.grown / peak.stage))
    return peaks
