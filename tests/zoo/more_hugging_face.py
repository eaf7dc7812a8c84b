"""More Hugging Face models, which the capture was not written for."""

import torch

from tests.zoo.hugging_face import (
    BOTH,
    CAUSAL,
    EXPERTS,
    GPT2,
    GROUPED,
    LENGTH,
    NO_DROP,
    PAIR,
    SOUND,
    STACK,
    T5,
    VISION,
    WORDS,
    bare_pictures,
    case,
    experts,
    labelled,
    labelled_pictures,
    masked,
    of_scores,
    pictures,
    translated,
    unmasked,
    waves,
    words,
)
from tests.zoo.trial import Call, Case

CHOSEN = {**GROUPED, **EXPERTS, "head_dim": 8}
ROUTED = {
    **GROUPED,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
CLASSIFIER = "ForImageClassification"


def boxes(n: int, g: torch.Generator) -> Call:
    corners = torch.randint(0, 20, (n, LENGTH, 2), generator=g)
    return (), {
        "input_ids": words(n, g),
        "bbox": torch.cat([corners, corners + 10], -1),
        "labels": words(n, g),
    }


CASES: dict[str, Case] = {
    # encoder and decoder
    "PLBart": case("PLBart", PAIR, BOTH, translated),
    "BigBird-Pegasus": case(
        "BigBirdPegasus", PAIR, {**BOTH, **NO_DROP, "attention_type": "original_full"}, translated
    ),
    "Pegasus-X": case(
        "PegasusX", PAIR, {**BOTH, **NO_DROP, "block_size": 4, "num_global_tokens": 4}, translated
    ),
    "Blenderbot small": case("BlenderbotSmall", PAIR, BOTH, translated),
    "Nougat's mBart decoder": case("MBart", CAUSAL, BOTH, labelled),
    "T5 classifier": case(
        "T5",
        "ForTokenClassification",
        {**T5, "num_labels": 5},
        lambda n, g: (
            (),
            {"input_ids": words(n, g), "labels": torch.randint(0, 5, (n, LENGTH), generator=g)},
        ),
    ),
    # mixtures of experts
    "Phi-MoE": experts("Phimoe", CAUSAL, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GLM-4-MoE": experts("Glm4Moe", CAUSAL, ROUTED),
    "dots1": experts("Dots1", CAUSAL, ROUTED),
    "ERNIE 4.5 MoE": experts(
        "Ernie4_5_Moe",
        CAUSAL,
        {
            **GROUPED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
    ),
    "Granite-MoE, shared": experts(
        "GraniteMoeShared",
        CAUSAL,
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    ),
    "DBRX": experts(
        "Dbrx",
        CAUSAL,
        {
            "d_model": 16,
            "n_heads": 2,
            "n_layers": 2,
            "max_seq_len": 40,
            "vocab_size": WORDS,
            "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "Flex-OLMo": experts("FlexOlmo", CAUSAL, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-Next": experts(
        "Qwen3Next",
        CAUSAL,
        {
            **CHOSEN,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "LFM2": case("Lfm2", CAUSAL, {**GROUPED, "full_attn_idxs": [1]}),
    # decoders
    "GPT-BigCode": case("GPTBigCode", CAUSAL, GPT2),
    "CodeGen": case("CodeGen", CAUSAL, {**GPT2, "rotary_dim": 4, "n_head": 4, "n_embd": 32}),
    "OLMo": case("Olmo", CAUSAL, GROUPED),
    "OLMo 2": case("Olmo2", CAUSAL, GROUPED),
    "Nemotron": case("Nemotron", CAUSAL, {**GROUPED, "head_dim": 8}),
    "Persimmon": case("Persimmon", CAUSAL, {**STACK, "pad_token_id": 0}),
    "GLM": case("Glm", CAUSAL, {**GROUPED, "head_dim": 8}),
    "GLM-4": case("Glm4", CAUSAL, {**GROUPED, "head_dim": 8}),
    "Cohere 2": case("Cohere2", CAUSAL, {**GROUPED, "sliding_window": 4}),
    "Helium": case("Helium", CAUSAL, {**GROUPED, "head_dim": 8}),
    "SmolLM 3": case("SmolLM3", CAUSAL, GROUPED),
    "BioGPT": case("BioGpt", CAUSAL, {**STACK, "layerdrop": 0.0}),
    "XGLM": case(
        "XGLM",
        CAUSAL,
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "attention_heads": 2,
            "max_position_embeddings": 40,
            "layerdrop": 0.0,
        },
    ),
    "OpenAI GPT": case("OpenAIGPT", "LMHeadModel", GPT2),
    "Falcon-Mamba": case(
        "FalconMamba",
        CAUSAL,
        {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        unmasked,
    ),
    "Bamba": case(
        "Bamba",
        CAUSAL,
        {
            **GROUPED,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 4,
        },
    ),
    # encoders
    "CamemBERT": case("Camembert", "ForMaskedLM", {**STACK, "pad_token_id": 1}),
    "XLM": case(
        "XLM",
        "WithLMHeadModel",
        {"vocab_size": WORDS, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "pad_index": 0},
    ),
    "FlauBERT": case(
        "Flaubert",
        "WithLMHeadModel",
        {"vocab_size": WORDS, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "pad_index": 0},
    ),
    "ConvBERT": case("ConvBert", "ForMaskedLM", {**STACK, "embedding_size": 16, "conv_kernel_size": 3}),
    "MegatronBERT": case("MegatronBert", "ForMaskedLM", STACK),
    "RemBERT": case(
        "RemBert", "ForMaskedLM", {**STACK, "input_embedding_size": 8, "output_embedding_size": 8}
    ),
    "RoFormer": case("RoFormer", "ForMaskedLM", {**STACK, "embedding_size": 16}),
    "Nystromformer": case(
        "Nystromformer", "ForMaskedLM", {**STACK, "segment_means_seq_len": LENGTH, "num_landmarks": LENGTH}
    ),
    "YOSO": case("Yoso", "ForMaskedLM", {**STACK, "use_expectation": True, "pad_token_id": 0}),
    "I-BERT": case("IBert", "ForMaskedLM", {**STACK, "pad_token_id": 1}),
    "ESM": case(
        "Esm",
        "ForMaskedLM",
        {**STACK, "pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary"},
    ),
    "Splinter": case(
        "Splinter",
        "ForQuestionAnswering",
        STACK,
        lambda n, g: (
            (),
            {
                "input_ids": words(n, g),
                "start_positions": torch.randint(0, LENGTH, (n,), generator=g),
                "end_positions": torch.randint(0, LENGTH, (n,), generator=g),
            },
        ),
    ),
    "CANINE": case(
        "Canine",
        "Model",
        {
            **STACK,
            "downsampling_rate": 4,
            "num_hash_buckets": 16,
            "local_transformer_stride": 4,
            "upsampling_kernel_size": 4,
        },
        masked,
        of_scores,
    ),
    "LayoutLM": case("LayoutLM", "ForMaskedLM", {**STACK, "max_2d_position_embeddings": 40}, boxes),
    "BERT, choices": case(
        "Bert",
        "ForMultipleChoice",
        STACK,
        lambda n, g: (
            (),
            {
                "input_ids": torch.randint(5, 60, (n, 3, LENGTH), generator=g),
                "labels": torch.randint(0, 3, (n,), generator=g),
            },
        ),
    ),
    # pictures
    "DeiT": case("DeiT", CLASSIFIER, VISION, labelled_pictures),
    "MAE": case("ViTMAE", "Model", {**VISION, "mask_ratio": 0.0}, bare_pictures, of_scores),
    "ViT-MSN": case("ViTMSN", CLASSIFIER, VISION, labelled_pictures),
    "SwinV2": case(
        "Swinv2",
        CLASSIFIER,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 5,
        },
        labelled_pictures,
    ),
    "ConvNeXT V2": case(
        "ConvNextV2",
        CLASSIFIER,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
        labelled_pictures,
    ),
    "PoolFormer": case(
        "PoolFormer",
        CLASSIFIER,
        {
            "depths": [1, 1],
            "hidden_sizes": [8, 16],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "num_labels": 5,
        },
        labelled_pictures,
    ),
    "FocalNet": case(
        "FocalNet",
        CLASSIFIER,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "num_labels": 5,
        },
        labelled_pictures,
    ),
    "BiT": case(
        "Bit",
        CLASSIFIER,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2, "num_labels": 5},
        labelled_pictures,
    ),
    "YOLOS": case(
        "Yolos",
        "Model",
        {**VISION, "image_size": [32, 32], "num_detection_tokens": 4},
        bare_pictures,
        of_scores,
    ),
    # several senses
    "BLIP, captions": case(
        "Blip",
        PAIR,
        {
            "text_config": {
                **STACK,
                "encoder_hidden_size": 16,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "sep_token_id": 2,
                "pad_token_id": 0,
            },
            "vision_config": VISION,
        },
        lambda n, g: ((), {"input_ids": words(n, g), "pixel_values": pictures(n, g), "labels": words(n, g)}),
    ),
    "WavLM": case("WavLM", "ForSequenceClassification", SOUND, waves),
    "UniSpeech": case("UniSpeech", "ForSequenceClassification", SOUND, waves),
    "SEW": case("SEW", "ForSequenceClassification", {**SOUND, "squeeze_factor": 2}, waves),
    "Data2Vec, sound": case(
        "Data2VecAudio", "ForSequenceClassification", {**SOUND, "conv_pos_kernel_size": 3}, waves
    ),
    "Data2Vec, text": case("Data2VecText", "ForMaskedLM", {**STACK, "pad_token_id": 1}),
    "AST": case(
        "AST",
        "ForAudioClassification",
        {**VISION, "num_mel_bins": 16, "max_length": 24, "time_stride": 8, "frequency_stride": 8},
        lambda n, g: (
            (),
            {
                "input_values": torch.randn(n, 24, 16, generator=g).to(torch.get_default_dtype()),
                "labels": torch.randint(0, 5, (n,), generator=g),
            },
        ),
    ),
    "Speech2Text": case(
        "Speech2Text",
        PAIR,
        {
            **BOTH,
            **NO_DROP,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "num_conv_layers": 2,
            "max_source_positions": 40,
            "max_target_positions": 40,
        },
        lambda n, g: (
            (),
            {
                "input_features": torch.randn(n, 40, 8, generator=g).to(torch.get_default_dtype()),
                "labels": words(n, g, 9),
            },
        ),
    ),
}
