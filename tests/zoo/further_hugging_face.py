"""Further Hugging Face models: newer decoders, detection, video, speech with CTC, time series."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.hugging_face import (
    BOTH,
    CAUSAL,
    EXPERTS,
    GROUPED,
    LENGTH,
    NO_DROP,
    PAIR,
    SOUND,
    STACK,
    VISION,
    WORDS,
    bare_pictures,
    case,
    experts,
    hugging_face,
    labelled,
    labelled_pictures,
    large_pictures,
    of_loss,
    padding,
    transformers,
    unmasked,
    waves,
    words,
)
from tests.zoo.more_hugging_face import CLASSIFIER
from tests.zoo.trial import Call, Case

MASKED, BY_TOKEN, BY_TEXT = "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"
HEAD = {**GROUPED, "head_dim": 8}
LABELS = {**STACK, "num_labels": 5}
BARE_VISION = {key: value for key, value in VISION.items() if key != "num_labels"}
PYRAMID = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
PATCHES = {
    **{"num_input_channels": 2, "context_length": 32, "prediction_length": 8, "d_model": 16},
    **{"patch_length": 8, "patch_stride": 8},
}
FSMT = {**BOTH, **NO_DROP, "src_vocab_size": WORDS, "tgt_vocab_size": WORDS, "langs": ["en", "de"]}
CTC = {**SOUND, "vocab_size": 8, "ctc_zero_infinity": True, "ctc_loss_reduction": "mean"}


def floats(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(torch.get_default_dtype())


def mean_square(name: str) -> Any:
    def loss(out: Any) -> Tensor:
        values: Tensor = out[name]
        return values.square().mean() if values.shape[0] else values.sum()

    return loss


def classes(n: int, g: torch.Generator) -> Call:
    label = torch.randint(0, 5, (n,), generator=g)
    return (), {"input_ids": words(n, g), "attention_mask": padding(n, g), "labels": label}


def token_classes(n: int, g: torch.Generator) -> Call:
    return (), {"input_ids": words(n, g), "labels": torch.randint(0, 5, (n, LENGTH), generator=g)}


def spoken(n: int, g: torch.Generator) -> Call:
    return (), {"input_values": floats(g, n, 400), "labels": torch.randint(1, 7, (n, 4), generator=g)}


def videos(n: int, g: torch.Generator) -> Call:
    frames = floats(g, n, 4, 3, 32, 32)
    return (), {"pixel_values": frames, "labels": torch.randint(0, 5, (n,), generator=g)}


def series(n: int, g: torch.Generator) -> Call:
    return (), {"past_values": floats(g, n, 32, 2), "future_values": floats(g, n, 8, 2)}


def scenes(n: int, g: torch.Generator) -> Call:
    return (), {"pixel_values": floats(g, n, 3, 64, 64)}


def plays(n: int, g: torch.Generator) -> Call:
    return (), {
        "states": floats(g, n, LENGTH, 6),
        "actions": floats(g, n, LENGTH, 3),
        "rewards": floats(g, n, LENGTH, 1),
        "returns_to_go": floats(g, n, LENGTH, 1),
        "timesteps": torch.arange(LENGTH).expand(n, -1).contiguous(),
        "attention_mask": torch.ones(n, LENGTH, dtype=torch.long),
    }


def detector(name: str) -> Case:
    def make() -> nn.Module:
        backbone = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 12, 16, 24], depths=[1] * 4, layer_type="basic", num_labels=5
        )
        backbone.out_features = ["stage4"]
        rest = {key: value for key, value in BOTH.items() if key.startswith(("encoder", "decoder"))}
        rest.pop("decoder_start_token_id")
        config = getattr(transformers, f"{name}Config")(
            **{"backbone_config": backbone, "use_timm_backbone": False, "backbone": None},
            **{"d_model": 16, "num_queries": 6, "num_labels": 5, **rest},
        )
        model: nn.Module = getattr(transformers, f"{name}ForObjectDetection")(config)
        return model

    return Case(make, scenes, mean_square("logits"))


class Copied(nn.Module):
    """A model that changes its inputs gets copies."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids.clone(), attention_mask=attention_mask, labels=labels)


def images(name: str, config: dict[str, Any], **rest: Any) -> Case:
    return case(name, CLASSIFIER, {**config, "num_labels": 5}, labelled_pictures, **rest)


def large_images(name: str, config: dict[str, Any]) -> Case:
    return case(name, CLASSIFIER, {**config, "num_labels": 5}, large_pictures, by_microbatch=True)


CASES: dict[str, Case] = {
    # checks on data
    "Wav2Vec2, CTC": case("Wav2Vec2", "ForCTC", CTC, spoken),
    "HuBERT, CTC": case("Hubert", "ForCTC", CTC, spoken),
    "DeBERTa-v2 classifier": case("DebertaV2", BY_TEXT, LABELS, classes),
    "DeBERTa classifier": case("Deberta", BY_TEXT, LABELS, classes),
    "DETR": detector("Detr"),
    "Conditional DETR": detector("ConditionalDetr"),
    "Table Transformer": detector("TableTransformer"),
    "FSMT": experts("FSMT", PAIR, FSMT),
    "FSMT, copied inputs": Case(
        lambda: Copied(hugging_face("FSMT", PAIR, FSMT)()), labelled, of_loss, dtype=torch.float32
    ),
    # decoders
    "Arcee": case("Arcee", CAUSAL, GROUPED),
    "Apertus": case("Apertus", CAUSAL, GROUPED),
    "Doge": case("Doge", CAUSAL, GROUPED),
    "ERNIE 4.5": case("Ernie4_5", CAUSAL, HEAD),
    "EXAONE 4": case("Exaone4", CAUSAL, {**GROUPED, "sliding_window": 4, "sliding_window_pattern": 2}),
    "HunYuan": case("HunYuanDenseV1", CAUSAL, HEAD),
    "Ministral": case("Ministral", CAUSAL, HEAD),
    "OLMo 3": case("Olmo3", CAUSAL, GROUPED),
    "Seed-OSS": case("SeedOss", CAUSAL, HEAD),
    "VaultGemma": case("VaultGemma", CAUSAL, HEAD),
    "BitNet": case("BitNet", CAUSAL, GROUPED),
    "GPT-NeoX Japanese": case("GPTNeoXJapanese", CAUSAL, {**STACK, "intermediate_multiple_size": 2}),
    "BERT, generation": case("BertGeneration", "Decoder", {**STACK, "is_decoder": True}),
    "ImageGPT": case(
        "ImageGPT",
        "ForCausalImageModeling",
        {"vocab_size": WORDS, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2},
        unmasked,
    ),
    "JetMoe": experts(
        "JetMoe",
        CAUSAL,
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    ),
    "LFM2-MoE": experts(
        "Lfm2Moe",
        CAUSAL,
        {**GROUPED, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "MiniMax": experts("MiniMax", CAUSAL, {**HEAD, "num_local_experts": 4, "block_size": 4}),
    "xLSTM": case(
        "xLSTM",
        CAUSAL,
        {
            **{"vocab_size": WORDS, "hidden_size": 16, "embedding_dim": 16, "num_heads": 2, "chunk_size": 4},
            **{"num_hidden_layers": 2, "num_blocks": 2},
        },
        unmasked,
    ),
    "Decision Transformer": case(
        "DecisionTransformer",
        "Model",
        {"state_dim": 6, "act_dim": 3, "hidden_size": 16, "n_layer": 2, "n_head": 2, "max_ep_len": 40},
        plays,
        mean_square("action_preds"),
    ),
    # encoders
    "EuroBERT": case("EuroBert", MASKED, GROUPED),
    "LUKE": case("Luke", MASKED, {**STACK, "entity_vocab_size": 8, "entity_emb_size": 8}),
    "NomicBERT": case("NomicBert", MASKED, STACK),
    "RoCBert": case("RoCBert", MASKED, {**STACK, "enable_pronunciation": False, "enable_shape": False}),
    "X-MOD": case("Xmod", MASKED, {**STACK, "languages": ["en"], "default_language": "en"}),
    "ERNIE": case("Ernie", MASKED, STACK),
    "RoBERTa-PreLayerNorm": case("RobertaPreLayerNorm", MASKED, STACK),
    "XLM-RoBERTa-XL": case("XLMRobertaXL", MASKED, STACK),
    "BERT classifier": case("Bert", BY_TEXT, LABELS, classes),
    "MarkupLM": case(
        "MarkupLM",
        BY_TOKEN,
        {
            **{**LABELS, "max_depth": 6, "xpath_unit_hidden_size": 4, "tag_pad_id": 19, "subs_pad_id": 19},
            **{"max_xpath_tag_unit_embeddings": 20, "max_xpath_subs_unit_embeddings": 20},
        },
        token_classes,
    ),
    "MVP": case("Mvp", PAIR, {**BOTH, **NO_DROP}, labelled),
    # images and videos
    "DINOv3": case("DINOv3ViT", "Model", BARE_VISION, bare_pictures, mean_square("last_hidden_state")),
    "SigLIP vision": case(
        "SiglipVision", "Model", BARE_VISION, bare_pictures, mean_square("last_hidden_state")
    ),
    "AIMv2": case("Aimv2Vision", "Model", BARE_VISION, bare_pictures, mean_square("last_hidden_state")),
    "I-JEPA": images("IJepa", VISION),
    "Hiera": images(
        "Hiera",
        {
            **{"embed_dim": 8, "image_size": [32, 32], "patch_size": [3, 3], "patch_stride": [4, 4]},
            **{"patch_padding": [1, 1], "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1},
            **{"masked_unit_size": [4, 4], "query_stride": [2, 2]},
        },
    ),
    "PVT": images("Pvt", {**PYRAMID, "image_size": 32}),
    "PVT v2": images("PvtV2", {**PYRAMID, "image_size": 32}),
    "GLPN": case(
        "GLPN",
        "ForDepthEstimation",
        {**PYRAMID, "decoder_hidden_size": 8},
        bare_pictures,
        mean_square("predicted_depth"),
        by_microbatch=True,
    ),
    "MobileViT": images(
        "MobileViT",
        {
            **{"image_size": 32, "hidden_sizes": [8, 12, 16], "num_attention_heads": 2},
            "neck_hidden_sizes": [4, 4, 8, 8, 12, 12, 16],
        },
        by_microbatch=True,
    ),
    "MobileNetV1": large_images("MobileNetV1", {"depth_multiplier": 0.25, "image_size": 64, "min_depth": 8}),
    "LeViT": large_images(
        "Levit",
        {
            **{"image_size": 64, "hidden_sizes": [8, 12, 16], "num_attention_heads": [2, 2, 2]},
            **{"key_dim": [4, 4, 4], "depths": [1, 1, 1]},
        },
    ),
    "SwiftFormer": large_images(
        "SwiftFormer", {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16]}
    ),
    "VideoMAE": case("VideoMAE", "ForVideoClassification", {**VISION, "num_frames": 4}, videos),
    "ViViT": case(
        "Vivit", "ForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]}, videos
    ),
    "TimeSformer": case("Timesformer", "ForVideoClassification", {**VISION, "num_frames": 4}, videos),
    # sound and time series
    "Wav2Vec2-Conformer": case(
        "Wav2Vec2Conformer", BY_TEXT, {**SOUND, "conv_depthwise_kernel_size": 3}, waves, by_microbatch=True
    ),
    "UniSpeech-SAT": case("UniSpeechSat", BY_TEXT, SOUND, waves),
    "PatchTST": case(
        "PatchTST",
        "ForPrediction",
        {
            **PATCHES,
            "ffn_dim": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "norm_type": "layernorm",
        },
        series,
    ),
    "PatchTSMixer": case(
        "PatchTSMixer", "ForPrediction", {**PATCHES, "num_layers": 2, "norm_mlp": "LayerNorm"}, series
    ),
}
