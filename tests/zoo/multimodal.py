"""Hugging Face models of images with text, segmentation, speech codecs, time series and hybrid decoders."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import varuna
from tests.zoo.further_hugging_face import HEAD, floats, mean_square
from tests.zoo.hugging_face import (
    CAUSAL,
    GROUPED,
    PAIR,
    SOUND,
    STACK,
    VISION,
    WORDS,
    case,
    experts,
    of_loss,
    transformers,
    unmasked,
    words,
)
from tests.zoo.trial import Call, Case

IMAGE_TOKEN = WORDS - 1
PATCHES = 16
BARE_VISION = {key: value for key, value in VISION.items() if key != "num_labels"}


def text_with_images(n: int, g: torch.Generator, tokens: int = PATCHES) -> Call:
    """One image for each sample, whose tokens stand at the start of the text."""
    ids = torch.cat([torch.full((n, tokens), IMAGE_TOKEN), words(n, g)], 1)
    return (), {
        "input_ids": ids,
        "pixel_values": floats(g, n, 3, 32, 32),
        "attention_mask": torch.ones_like(ids),
        "labels": torch.where(ids == IMAGE_TOKEN, -100, ids),
    }


def reads_images(name: str, vision: str, head: str = PAIR, **more: Any) -> Case:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            vision_config=getattr(transformers, vision)(**BARE_VISION),
            text_config=transformers.LlamaConfig(**GROUPED),
            image_token_id=IMAGE_TOKEN,
            **more,
        )
        model: nn.Module = getattr(transformers, f"{name}{head}")(config)
        return model

    return Case(make, text_with_images, of_loss)


def grid_images(n: int, g: torch.Generator) -> Call:
    """Patches of all images in one tensor, as the processor of Qwen2-VL makes them."""
    ids = torch.cat([torch.full((n, 1), 60), torch.full((n, 4), IMAGE_TOKEN), words(n, g)], 1)
    return (), {
        "input_ids": ids,
        "pixel_values": floats(g, n * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(n, 1),
        "labels": torch.where(ids >= 60, -100, ids),
    }


def qwen_vl(name: str) -> Case:
    def make() -> nn.Module:
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        config = getattr(transformers, f"{name}Config")(
            text_config={**GROUPED, "rope_scaling": rope},
            vision_config={
                **{"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
                **{"intermediate_size": 32, "out_hidden_size": 16, "spatial_merge_size": 2},
            },
            image_token_id=IMAGE_TOKEN,
            vision_start_token_id=60,
        )
        model: nn.Module = getattr(transformers, f"{name}{PAIR}")(config)
        return model

    return Case(make, grid_images, of_loss)


def two_towers(name: str, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        text = {**STACK, "projection_dim": 8, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
        config = getattr(transformers, f"{name}Config")(
            text_config=text, vision_config={**BARE_VISION, "projection_dim": 8}, **more
        )
        model: nn.Module = getattr(transformers, f"{name}Model")(config)
        return model

    return make


def text_and_picture(n: int, g: torch.Generator) -> Call:
    return (), {"input_ids": words(n, g), "pixel_values": floats(g, n, 3, 32, 32)}


def points(n: int, g: torch.Generator) -> Call:
    return (), {
        "pixel_values": floats(g, n, 3, 64, 64),
        "input_points": torch.randint(0, 60, (n, 1, 2, 2), generator=g).to(torch.get_default_dtype()),
    }


def sam() -> nn.Module:
    vision = {
        **{"hidden_size": 16, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{
            "image_size": 64,
            "patch_size": 16,
            "mlp_dim": 32,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
        },
    }
    prompt = {
        "hidden_size": 32,
        "image_size": 64,
        "patch_size": 16,
        "image_embedding_size": 4,
        "mask_input_channels": 4,
    }
    decoder = {
        **{"hidden_size": 32, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"iou_head_hidden_dim": 8, "iou_head_depth": 2, "attention_downsample_rate": 1},
    }
    model: nn.Module = transformers.SamModel(
        transformers.SamConfig(
            vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
        )
    )
    return model


def swin() -> Any:
    return transformers.SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )


def upernet() -> nn.Module:
    config = transformers.UperNetConfig(
        backbone_config=swin(), hidden_size=8, num_labels=5, use_auxiliary_head=False, pool_scales=[1, 2]
    )
    model: nn.Module = transformers.UperNetForSemanticSegmentation(config)
    return model


def segmented(n: int, g: torch.Generator) -> Call:
    return (), {
        "pixel_values": floats(g, n, 3, 32, 32),
        "labels": torch.randint(0, 5, (n, 32, 32), generator=g),
    }


def waveform(n: int, g: torch.Generator) -> Call:
    return (), {"input_values": floats(g, n, 1, 320)}


def history(n: int, g: torch.Generator, length: int = 24) -> Call:
    past = length + 7
    return (), {
        "past_values": floats(g, n, past).abs(),
        "past_time_features": floats(g, n, past, 2),
        "past_observed_mask": torch.ones(n, past),
        "future_values": floats(g, n, 8).abs(),
        "future_time_features": floats(g, n, 8, 2),
    }


FORECAST = {
    **{
        "prediction_length": 8,
        "context_length": 24,
        "num_time_features": 2,
        "d_model": 16,
        "scaling": "mean",
    },
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
HYBRID = {
    **GROUPED,
    **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 4, "mamba_expand": 2},
}
ZAMBA = {
    **{**GROUPED, "num_key_value_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2},
    **{"layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 5},
}
ZAMBA2 = {
    **{**GROUPED, "num_key_value_heads": 2, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4},
    **{"mamba_headdim": 8, "chunk_size": 4, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3]},
    **{"num_mem_blocks": 1, "use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid"] * 2},
}
GRANITE_HYBRID = {
    **{**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    **{"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    **{"layer_types": ["mamba", "attention", "mamba"]},
}
REFORMER = {
    **{"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8},
    **{"feed_forward_size": 32, "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [8, 8], "is_decoder": True},
    **{"attn_layers": ["local", "local"], "local_attn_chunk_length": 4, "max_position_embeddings": 12},
}
SEW_D = {
    **SOUND,
    "conv_dim": [8, 8],
    "squeeze_factor": 1,
    "position_buckets": 8,
    "max_position_embeddings": 40,
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"), 0.0
)
GEMMA_3N = {
    **{**HEAD, "vocab_size_per_layer_input": WORDS, "hidden_size_per_layer_input": 4, "laurel_rank": 4},
    **{"num_kv_shared_layers": 0, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 3},
    **{"layer_types": ["full_attention"] * 3},
}
BARK = {
    **{"input_vocab_size": WORDS, "output_vocab_size": WORDS, "num_layers": 2, "num_heads": 2},
    **{"hidden_size": 16, "block_size": 40},
}


def wav(n: int, g: torch.Generator) -> Call:
    return (), {"input_values": floats(g, n, 400), "labels": torch.randint(0, 5, (n,), generator=g)}


def codes(n: int, g: torch.Generator) -> Call:
    return (words(n, g),), {}


def questions(n: int, g: torch.Generator) -> Call:
    return (), {
        "input_ids": words(n, g),
        "pixel_values": floats(g, n, 3, 32, 32),
        "pixel_mask": torch.ones(n, 32, 32, dtype=torch.long),
        "labels": torch.rand(n, 5, generator=g).to(torch.get_default_dtype()),
    }


class Eyes(nn.Module):
    """The images of all samples, each of 4 by 4 patches: the grid is made here, not passed on."""

    def __init__(self, visual: nn.Module) -> None:
        super().__init__()
        self.visual = visual

    def forward(self, pixel_values: Tensor) -> Tensor:
        grid = torch.tensor([[1, 4, 4]], device=pixel_values.device).repeat(len(pixel_values), 1)
        seen: Tensor = self.visual(pixel_values.flatten(0, 1), grid_thw=grid).pooler_output
        return seen.view(len(pixel_values), 4, -1)


class SeesAndReads(nn.Module):
    """The parts of Qwen2-VL, put together for images of one size, each sample with its own patches."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.eyes, self.text, self.head = Eyes(model.model.visual), model.model.language_model, model.lm_head
        varuna.opaque(self, "eyes")

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, position_ids: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        words = self.text.get_input_embeddings()(input_ids)
        images = (input_ids == IMAGE_TOKEN).unsqueeze(-1)
        words = words.masked_scatter(images, self.eyes(pixel_values).to(words.dtype))
        out = self.text(inputs_embeds=words, position_ids=position_ids.transpose(0, 1), use_cache=False)
        scores = self.head(out.last_hidden_state)[:, :-1]
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())}


def own_rows(n: int, g: torch.Generator) -> Call:
    _, found = grid_images(n, g)
    found["pixel_values"] = found["pixel_values"].view(n, 16, -1)
    found.pop("image_grid_thw")
    found["position_ids"] = torch.arange(found["input_ids"].shape[1]).expand(n, 3, -1).contiguous()
    return (), found


def changed(original: Case, *opaque: str) -> Case:
    return replace(original, make=lambda: varuna.opaque(original.make(), *opaque))


class WholePictures(transformers.models.vilt.modeling_vilt.ViltEmbeddings):
    """Embeds pictures of one size without padding; ViLT itself puts their patches in random order."""

    def visual_embed(self, pixel_values: Tensor, pixel_mask: Tensor, max_image_length: int = -1) -> Any:
        patches = self.patch_embeddings(pixel_values)
        height, width = patches.shape[2:]
        x = patches.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position_embeddings
        return self.dropout(x), torch.ones_like(x[..., 0], dtype=torch.long), (None, (height, width))


def vilt_of_whole_pictures() -> nn.Module:
    model: nn.Module = CASES["ViLT"].make()
    model.vilt.embeddings.__class__ = WholePictures
    return model


def gemma_without_clips() -> nn.Module:
    """Gemma 3n clamps weights inside forward; a script can clamp them after each step."""
    model: nn.Module = CASES["Gemma 3n"].make()
    object.__setattr__(model.config, "altup_coef_clip", None)
    return model


CASES: dict[str, Case] = {
    # images with text
    "LLaVA": reads_images("Llava", "CLIPVisionConfig", vision_feature_layer=-1),
    "VipLLaVA": reads_images("VipLlava", "CLIPVisionConfig", vision_feature_layers=[-1, -2]),
    "Qwen2-VL": qwen_vl("Qwen2VL"),
    "Qwen2.5-VL": qwen_vl("Qwen2_5_VL"),
    "CLIP model": Case(two_towers("CLIP"), text_and_picture, mean_square("text_embeds")),
    "SigLIP model": Case(two_towers("Siglip"), text_and_picture, mean_square("text_embeds")),
    "ViLT": case("Vilt", "ForQuestionAnswering", {**STACK, **VISION, "num_labels": 5}, questions),
    # segmentation
    "SAM": Case(sam, points, mean_square("pred_masks")),
    "UperNet": Case(upernet, segmented, of_loss, by_microbatch=True),
    "DPT": case(
        "DPT",
        "ForSemanticSegmentation",
        {
            **VISION,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
            "use_auxiliary_head": True,
            "reassemble_factors": [4, 2, 1, 0.5],
        },
        segmented,
        by_microbatch=True,
    ),
    # sound
    "Encodec": case(
        "Encodec",
        "Model",
        {
            "num_filters": 4,
            "upsampling_ratios": [4, 2],
            "codebook_size": 8,
            "hidden_size": 8,
            "codebook_dim": 8,
            "num_lstm_layers": 1,
            "target_bandwidths": [12.0],
            "sampling_rate": 8000,
        },
        waveform,
        mean_square("audio_values"),
    ),
    "DAC": case(
        "Dac",
        "Model",
        {
            "encoder_hidden_size": 4,
            "downsampling_ratios": [2, 2],
            "decoder_hidden_size": 16,
            "upsampling_ratios": [2, 2],
            "n_codebooks": 2,
            "codebook_size": 8,
            "codebook_dim": 4,
        },
        waveform,
        mean_square("audio_values"),
    ),
    "Bark, semantic": case("BarkSemantic", "Model", {**BARK}, codes, mean_square("logits")),
    "SEW-D": case("SEWD", "ForSequenceClassification", SEW_D, wav),
    # time series
    "TimeSeriesTransformer": case("TimeSeriesTransformer", "ForPrediction", FORECAST, history),
    "Informer": case(
        "Informer", "ForPrediction", {**FORECAST, "attention_type": "full", "distil": False}, history
    ),
    "Informer, distilled": case("Informer", "ForPrediction", FORECAST, history),
    "Informer, prob": case("Informer", "ForPrediction", {**FORECAST, "distil": False}, history),
    "Autoformer": case(
        "Autoformer",
        "ForPrediction",
        {**FORECAST, "label_length": 4, "moving_average": 3},
        history,
        dtype=torch.float32,
    ),
    # decoders
    "Zamba": case("Zamba", CAUSAL, ZAMBA),
    "Zamba 2": case("Zamba2", CAUSAL, ZAMBA2),
    "Falcon-H1": case("FalconH1", CAUSAL, HYBRID),
    "Granite-MoE-hybrid": experts("GraniteMoeHybrid", CAUSAL, GRANITE_HYBRID),
    "Nemotron-H": case(
        "NemotronH",
        CAUSAL,
        {
            **GROUPED,
            "hybrid_override_pattern": "M*-",
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "head_dim": 8,
        },
    ),
    "Reformer": case("Reformer", "ModelWithLMHead", REFORMER, unmasked),
    "Gemma 3n": case("Gemma3n", CAUSAL, GEMMA_3N, config_class="Gemma3nTextConfig"),
}

CASES["Qwen2-VL, its parts"] = Case(lambda: SeesAndReads(CASES["Qwen2-VL"].make()), own_rows, of_loss)
CASES["Qwen2.5-VL, its parts"] = Case(lambda: SeesAndReads(CASES["Qwen2.5-VL"].make()), own_rows, of_loss)
CASES["ViLT, whole pictures"] = replace(CASES["ViLT"], make=vilt_of_whole_pictures)
CASES["ViLT, opaque embeddings"] = changed(CASES["ViLT"], "vilt.embeddings")
CASES["SEW-D, opaque layers"] = changed(
    CASES["SEW-D"], "sew_d.encoder.encoder.layer.*", "sew_d.feature_projection"
)
CASES["SEW-D, no dropout"] = case("SEWD", "ForSequenceClassification", {**SEW_D, **NO_DROPOUT}, wav)
CASES["Gemma 3n, unclipped"] = replace(CASES["Gemma 3n"], make=gemma_without_clips)
