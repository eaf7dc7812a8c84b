"""Models on `meta` are filled from Hugging Face folders, each rank with its own stage, and saved back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.hf.models import make_batch, make_model, write_folder
from tests.pool import Pool
from tests.tasks import logged, remembering, stage_map
from varuna import Varuna, cut_after, get_this_rank_config_varuna
from varuna.errors import CheckpointError
from varuna.hf import empty_model, from_pretrained, hf_weights, save_pretrained
from varuna.hf.folder import find_tensors

LAYOUTS = [(2, 1), (1, 2), (2, 2), (3, 1)]
BLOCKS = {"gpt2": "transformer.h.*", "llama": "model.layers.*", "bert": "bert.encoder.layer.*"}
BATCH, STEPS = 6, 2


def classes(name: str) -> tuple[Any, dict[str, Any]]:
    import transformers as hf

    if name == "bert-head":
        return hf.BertForSequenceClassification, {"num_labels": 3}
    return None, {}


def share(inputs: dict[str, Tensor], replica: int, width: int) -> dict[str, Tensor]:
    size = BATCH // width
    return {key: value[replica * size : (replica + 1) * size] for key, value in inputs.items()}


def train_plain(name: str, model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(**make_batch(name, BATCH, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}


def load_and_train(folder: str, name: str, depth: int, width: int, out: str) -> dict[str, Any]:
    """Fill a model on meta, train it, save it; return all that a test compares."""
    kind, config = classes(name)
    rank = dist.get_rank()
    mapping = stage_map(depth, width)
    replica = get_this_rank_config_varuna(mapping, rank)[1]
    weights = hf_weights(folder)
    model = empty_model(folder, kind, **config)
    assert all(p.is_meta for p in model.parameters())
    cut_after(model, BLOCKS[name.split("-")[0]])
    with logged("varuna") as lines, remembering(("hf", name)):
        wrapped = Varuna(
            model, mapping, make_batch(name, 2), BATCH, 2, device="cpu", seed=3, initialize=weights
        )
    start = {key: value.clone() for key, value in wrapped.full_state_dict().items()}
    stage_bytes = sum(p.numel() * 4 for p in wrapped.parameters())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.set_optimizer(optimizer)
    losses = []
    for step in range(STEPS):
        loss, _ = wrapped.step(share(make_batch(name, BATCH, step), replica, width))
        optimizer.step()
        wrapped.zero_grad()
        losses.append(loss)
    save_pretrained(wrapped, out, max_shard_bytes=20_000)
    end = wrapped.full_state_dict()
    wrapped.close()
    return {
        **{"start": start, "losses": losses, "end": end, "log": [x for x in lines if "as new" in x]},
        **{"read": weights.bytes_read, "stage": stage_bytes},
    }


def reload(folder: Path, name: str) -> nn.Module:
    import transformers as hf

    kind = {"bert-head": hf.BertForSequenceClassification, "gpt2": hf.GPT2LMHeadModel}
    model, info = kind.get(name, hf.LlamaForCausalLM).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.train()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert-head"])
def test_each_rank_reads_its_stage_and_trains_as_one_process(pool: Pool, name: str, tmp_path: Path) -> None:
    """TRA-3: shards, tied weights that are not in the file, a bf16 file, a base model under a new head."""
    dtype = torch.bfloat16 if name == "llama" else None
    base = write_folder(tmp_path / "in", "bert" if name == "bert-head" else name, shards=3, dtype=dtype)
    assert (tmp_path / "in/model.safetensors.index.json").exists()
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for depth, width in [(1, 1), *LAYOUTS]:
        out = tmp_path / f"out-{depth}-{width}"
        results = pool.run(load_and_train, depth * width, str(tmp_path / "in"), name, depth, width, str(out))
        found[depth, width] = results[0]
        for result in results:
            file_bytes = result["stage"] // (2 if dtype else 1)
            assert result["read"] <= file_bytes + 4096  # buffers of BERT
        new = [line for result in results for line in result["log"]]
        assert len(new) == (name == "bert-head") and all("classifier.weight" in line for line in new)
        saved = reload(out, name).state_dict()
        for key, value in results[0]["end"].items():
            assert torch.equal(saved[key], value), key
        assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    one = found[1, 1]
    prefix = "bert." if name == "bert-head" else ""
    for key, value in base.state_dict().items():
        assert torch.equal(one["start"][prefix + key], value.float()), key
    plain = make_model(name, num_labels=3) if name == "bert-head" else make_model(name)
    plain.load_state_dict(one["start"])
    losses, end = train_plain(name, plain)
    for result in found.values():
        assert all(torch.equal(result["start"][key], one["start"][key]) for key in one["start"])
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        for key, value in result["end"].items():
            torch.testing.assert_close(value, end[key], rtol=1e-4, atol=1e-6)


def fill_partitioned(folder: str, out: str, depth: int, on_meta: bool) -> dict[str, Tensor]:
    model = empty_model(folder) if on_meta else make_model("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = RaNNCModule(
        model, optimizer, device="cpu", partition_num=depth, initialize=hf_weights(folder), seed=1
    )
    wrapped(**make_batch("gpt2", 2)).loss.backward()
    state = {key: value.clone() for key, value in wrapped.state_dict().items()}
    optimizer.step()
    assert len(wrapped.plan.stages) == depth
    save_pretrained(wrapped, out)
    end = wrapped.state_dict()
    assert any(not torch.equal(end[key], value) for key, value in state.items())
    wrapped.undeploy()
    return state


@pytest.mark.parametrize("on_meta", [True, False])
def test_rannc_modules_are_filled_too(pool: Pool, on_meta: bool, tmp_path: Path) -> None:
    """TRA-3: RaNNCModule; a model with values gets those of the folder."""
    base = write_folder(tmp_path / "in", "gpt2", shards=2)
    for state in pool.run(fill_partitioned, 2, str(tmp_path / "in"), str(tmp_path / "out"), 2, on_meta):
        for key, value in base.state_dict().items():
            assert torch.equal(state[key], value), key
    reload(tmp_path / "out", "gpt2")


def wrap(folder: Path, name: str = "gpt2", **options: Any) -> dict[str, Tensor]:
    """Fill a model in one process; return its state."""
    model = options.pop("model", None)
    kind = options.pop("kind", None)
    weights = hf_weights(folder, **{key: options.pop(key) for key in list(options) if key != "config"})
    model = empty_model(folder, kind, **options.pop("config", {})) if model is None else model
    wrapped = Varuna(
        model, "0;", make_batch(name, 2), 2, 2, device="cpu", initialize=weights, from_cache=False
    )
    state = wrapped.full_state_dict()
    wrapped.close()
    return state


@pytest.mark.parametrize("is_dropped", [False, True])
def test_the_generation_config_of_the_folder_is_kept(is_dropped: bool, tmp_path: Path) -> None:
    """TRA-3: a default one ends texts at other tokens. Changes of a model that the script keeps count."""
    base = make_model("gpt2")
    base.generation_config.update(eos_token_id=[1, 9], do_sample=True, temperature=0.6, top_k=5)
    base.save_pretrained(tmp_path / "a")
    model: Any = empty_model(tmp_path / "a")
    weights = hf_weights(tmp_path / "a")
    wrapped = Varuna(model, "0;", make_batch("gpt2", 2), 2, 2, device="cpu", initialize=weights)
    model.generation_config.top_k = 7
    if is_dropped:
        del model
    save_pretrained(wrapped, tmp_path / "b")
    wrapped.close()
    found: Any = reload(tmp_path / "b", "gpt2").generation_config
    assert (found.eos_token_id, found.temperature) == ([1, 9], 0.6)
    assert found.top_k == (5 if is_dropped else 7)


def test_a_folder_may_have_no_generation_config(tmp_path: Path) -> None:
    """TRA-3: then it follows from the config, and a model that cannot generate has none."""
    write_folder(tmp_path / "a", "gpt2")
    (tmp_path / "a" / "generation_config.json").unlink()
    model: Any = empty_model(tmp_path / "a")
    assert model.generation_config.eos_token_id == 0
    write_folder(tmp_path / "b", "bert")
    wrap(tmp_path / "b", "bert-head", kind=classes("bert-head")[0])


def test_folders_without_usable_weights_are_refused(tmp_path: Path) -> None:
    """TRA-3: no folder, no shards, a pickle only, a missing, truncated or foreign shard: each is named."""
    with pytest.raises(CheckpointError, match=r"does not exist .*snapshot_download"):
        wrap(tmp_path / "none", model=make_model("gpt2"))
    write_folder(tmp_path / "a", "gpt2", shards=3)
    shard = sorted((tmp_path / "a").glob("model-*"))[1]
    content = shard.read_bytes()
    for damaged in (content[:-7], content[:100], b""):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=shard.name):
            wrap(tmp_path / "a")
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} does not exist, but the index lists it"):
        wrap(tmp_path / "a")
    for path in (tmp_path / "a").glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="contains no model"):
        wrap(tmp_path / "a")
    torch.save(make_model("gpt2").state_dict(), tmp_path / "a/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle, which is not read \(convert"):
        wrap(tmp_path / "a")


def test_reading_needs_no_memory_beside_the_tensors(tmp_path: Path) -> None:
    """TRA-3: tensors of several sizes are read into their own memory, not through buffers of their size."""
    sizes = [200_000, 800_000, 200_000, 3_200_000] * 8
    tensors = {f"t{number}": torch.ones(size // 4) for number, size in enumerate(sizes)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    places, held = find_tensors(tmp_path), []
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    for place in places.values():
        held.append(place.read(torch.float32, torch.device("cpu")))
    grown = resident_bytes("VmHWM") - before
    assert grown <= 1.1 * sum(sizes)
    assert all(bool((tensor == 1).all()) for tensor in held)


def resident_bytes(name: str = "VmRSS") -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def test_weights_that_do_not_fit_are_named_with_the_way_out(tmp_path: Path) -> None:
    """TRA-3: missing, unexpected, resized, quantized and contradicting tensors."""
    from safetensors.torch import load_file, save_file

    base = write_folder(tmp_path / "a", "llama")
    file = tmp_path / "a/model.safetensors"
    tensors = load_file(file)

    def change(drop: str = "", **more: Tensor) -> None:
        kept = {key: value for key, value in tensors.items() if key != drop}
        save_file({**kept, **more}, file)

    norm = "model.norm.weight"
    change(norm, **{"model.other": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"lacks model.norm.weight, and LlamaFor\w+ has no model.other"):
        wrap(tmp_path / "a", "llama")
    state = wrap(tmp_path / "a", "llama", strict=False)
    assert torch.equal(state[norm], torch.ones(32))
    change(**{norm: torch.zeros(7)})
    with pytest.raises(CheckpointError, match=r"norm.weight \(\[7\] in the folder, \[32\] in the model"):
        wrap(tmp_path / "a", "llama")
    state = wrap(tmp_path / "a", "llama", ignore_mismatched_sizes=True)
    assert torch.equal(state[norm], torch.ones(32))
    change(**{norm: torch.zeros(32, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' of .* is torch.int8"):
        wrap(tmp_path / "a", "llama")
    with pytest.raises(CheckpointError, match=r"(?s)different values for .* tie_word_embeddings=False"):
        change()
        wrap(tmp_path / "a", "llama", config={"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match=r"does not fit the model: it lacks transformer.wpe"):
        wrap(tmp_path / "a", "gpt2", model=make_model("gpt2"))
    huge = tensors[norm].clone()
    huge[0] = 1e6
    change(**{norm: huge})
    with pytest.raises(CheckpointError, match=r"too large for torch.float16"):
        wrap(tmp_path / "a", "llama", model=make_model("llama").half())
    assert torch.equal(base.state_dict()[norm], tensors[norm])


def test_a_head_models_file_fills_the_base_model_and_other_heads(tmp_path: Path) -> None:
    """TRA-3: `bert.` is removed or added; the other head's weights are ignored, missing ones are named."""
    import transformers as hf

    base = write_folder(tmp_path / "a", "bert-mlm").state_dict()
    weights = hf_weights(tmp_path / "a", strict=False)
    model = empty_model(tmp_path / "a", hf.BertModel)
    weights.bind(model, ())
    device = torch.device("cpu")
    for name in ("encoder.layer.1.output.dense.weight", "embeddings.word_embeddings.weight"):
        assert torch.equal(weights.read(name, torch.float32, device), base[f"bert.{name}"])
    with pytest.raises(CheckpointError, match=r"lacks pooler.dense.weight, pooler.dense.bias \("):
        hf_weights(tmp_path / "a").bind(model, ())
    with logged("varuna") as lines:
        wrap(tmp_path / "a", "bert-head", kind=hf.BertForSequenceClassification, strict=False)
    (line,) = [line for line in lines if "as new" in line]
    assert "classifier.weight" in line and "bert.pooler.dense.bias" in line and "cls." not in line


def fail_to_save(folder: str) -> str:
    model = make_model("gpt2")
    wrapped = from_pretrained(folder, stage_map(2, 1), make_batch("gpt2", 2), 2, 2, device="cpu")
    with pytest.raises(CheckpointError, match="already exists") as first:
        save_pretrained(wrapped, folder)
    save_pretrained(wrapped, folder, overwrite=True, dtype=torch.bfloat16)
    wrapped.close()
    del model
    return str(first.value)


def test_an_existing_model_is_replaced_only_on_request(pool: Pool, tmp_path: Path) -> None:
    """TRA-3: all ranks raise the same error; the folder's dtype is in the config."""
    write_folder(tmp_path / "a", "gpt2", shards=3)
    first, second = pool.run(fail_to_save, 2, str(tmp_path / "a"))
    assert first == second
    assert reload(tmp_path / "a", "gpt2").lm_head.weight.dtype == torch.bfloat16
    assert not list((tmp_path / "a").glob(".varuna*"))
    shutil.rmtree(tmp_path / "a")


def test_a_folder_has_the_names_that_transformers_writes(tmp_path: Path) -> None:
    """TRA-3: newer versions of transformers have renamed the modules of many models, but not their files."""
    import transformers as hf

    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    plain = hf.ViTForImageClassification(hf.ViTConfig(**sizes, **dry, image_size=8, patch_size=4))
    plain.save_pretrained(tmp_path / "plain")
    model = empty_model(tmp_path / "plain")
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}
    weights = hf_weights(tmp_path / "plain")
    wrapped = Varuna(model, "0", batch, batch_size=2, chunk_size=2, device="cpu", initialize=weights)
    save_pretrained(wrapped, tmp_path / "mine")
    wrapped.close()
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "mine"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
