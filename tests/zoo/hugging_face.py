"""Hugging Face models of every kind, small, from their configs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import varuna
from tests.zoo.trial import Call, Case

transformers: Any = __import__("transformers")

WORDS = 64
LENGTH = 12
STACK: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "max_position_embeddings": 40,
}
GROUPED = {**STACK, "num_key_value_heads": 1, "pad_token_id": 0}
BOTH: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "vocab_size": WORDS,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
PROPHET = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "encoder_ffn_dim": 32,
    "num_encoder_layers": 2,
    "num_encoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
SWITCH = {
    **T5,
    "num_experts": 4,
    "expert_capacity": 64,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
}
SOUND: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 5,
    "classifier_proj_size": 8,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
VISION = {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}
NO_DROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
NLLB = {
    **BOTH,
    "num_experts": 4,
    "expert_capacity": 64,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "moe_token_dropout": 0.0,
    "activation_dropout": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    **NO_DROP,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def words(n: int, g: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(5, WORDS - 4, (n, length), generator=g)


def padding(n: int, g: torch.Generator) -> Tensor:
    """Return ones, and zeros after the end of each sentence."""
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=g)
    return (torch.arange(LENGTH) < ends).long()


def labelled(n: int, g: torch.Generator) -> Call:
    ids = words(n, g)
    return (), {"input_ids": ids, "attention_mask": padding(n, g), "labels": words(n, g)}


def unmasked(n: int, g: torch.Generator) -> Call:
    return (), {"input_ids": words(n, g), "labels": words(n, g)}


def bare(n: int, g: torch.Generator) -> Call:
    return (words(n, g),), {}


def masked(n: int, g: torch.Generator) -> Call:
    return (), {"input_ids": words(n, g), "attention_mask": padding(n, g)}


def translated(n: int, g: torch.Generator) -> Call:
    return (), {"input_ids": words(n, g), "attention_mask": padding(n, g), "labels": words(n, g, 9)}


def decoded(n: int, g: torch.Generator) -> Call:
    return (), {"input_ids": words(n, g), "decoder_input_ids": words(n, g, 9)}


def pictures(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=g, dtype=torch.float64).to(torch.get_default_dtype())


def labelled_pictures(n: int, g: torch.Generator) -> Call:
    return (), {"pixel_values": pictures(n, g), "labels": torch.randint(0, 5, (n,), generator=g)}


def large_pictures(n: int, g: torch.Generator) -> Call:
    """Images that have four pixels at the end: BatchNorm rejects a single one."""
    picture = torch.randn(n, 3, 64, 64, generator=g, dtype=torch.float64).to(torch.get_default_dtype())
    return (), {"pixel_values": picture, "labels": torch.randint(0, 5, (n,), generator=g)}


def bare_pictures(n: int, g: torch.Generator) -> Call:
    return (pictures(n, g),), {}


def waves(n: int, g: torch.Generator) -> Call:
    wave = torch.randn(n, 400, generator=g, dtype=torch.float64).to(torch.get_default_dtype())
    return (), {"input_values": wave, "labels": torch.randint(0, 5, (n,), generator=g)}


def spectrum(n: int, g: torch.Generator) -> Call:
    features = torch.randn(n, 8, 40, generator=g, dtype=torch.float64).to(torch.get_default_dtype())
    return (), {"input_features": features, "labels": words(n, g, 9)}


def of_loss(out: Any) -> Tensor:
    loss: Tensor = out["loss"]
    return loss


def of_scores(out: Any) -> Tensor:
    """A loss outside the model: a mean over the samples."""
    scores: Tensor = out[0]
    return scores.square().flatten(1).mean(1).mean() if scores.shape[0] else scores.sum()


def hugging_face(
    name: str, head: str, config: dict[str, Any], *, config_class: str = "", attention: str = ""
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = getattr(transformers, config_class or f"{name}Config")(**config)
        if attention:
            made._attn_implementation = attention
        model: nn.Module = getattr(transformers, f"{name}{head}")(made)
        return model

    return make


def experts(*args: Any, **kwargs: Any) -> Case:
    """A case in fp32: grouped_mm has no fp64."""
    return case(*args, **kwargs, dtype=torch.float32)


def case(
    name: str,
    head: str,
    config: dict[str, Any],
    inputs: Callable[[int, torch.Generator], Call] = labelled,
    loss: Callable[[Any], Tensor] = of_loss,
    *,
    config_class: str = "",
    attention: str = "",
    **rest: Any,
) -> Case:
    return Case(
        hugging_face(name, head, config, config_class=config_class, attention=attention), inputs, loss, **rest
    )


class Embeddings(nn.Module):
    """Both towers of CLIP, without the scores of every text against every image."""

    def __init__(self, towers: nn.Module) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        out = self.towers(input_ids=input_ids, pixel_values=pixel_values)
        return out["text_embeds"], out["image_embeds"]


CAUSAL, PAIR = "ForCausalLM", "ForConditionalGeneration"
GPT2 = {"n_layer": 3, "n_head": 2, "n_embd": 16, "vocab_size": WORDS, "n_positions": 40}

CASES: dict[str, Case] = {
    # encoder and decoder
    "T5": case("T5", PAIR, T5, translated),
    "T5, loss outside": case("T5", PAIR, T5, decoded, of_scores),
    "T5 encoder": case("T5", "EncoderModel", T5, masked, of_scores),
    "mT5": case("MT5", PAIR, {**T5, "feed_forward_proj": "gated-gelu"}, translated),
    "LongT5": case("LongT5", PAIR, {**T5, "local_radius": 4, "global_block_size": 4}, translated),
    "UMT5": case("UMT5", PAIR, T5, translated),
    "Bart": case("Bart", PAIR, BOTH, translated),
    "Bart classifier": case("Bart", "ForCausalLM", BOTH, labelled),
    "mBart": case("MBart", PAIR, BOTH, translated),
    "Marian": case("Marian", "MTModel", BOTH, translated),
    "Pegasus": case("Pegasus", PAIR, BOTH, translated),
    "Whisper": case(
        "Whisper",
        PAIR,
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40},
        spectrum,
    ),
    "M2M100, layers dropped": case("M2M100", PAIR, BOTH, translated),
    "M2M100": case("M2M100", PAIR, {**BOTH, **NO_DROP}, translated),
    "Blenderbot": case("Blenderbot", PAIR, BOTH, translated),
    "LED": case(
        "LED",
        PAIR,
        {
            **BOTH,
            "attention_window": 4,
            "max_encoder_position_embeddings": 40,
            "max_decoder_position_embeddings": 40,
        },
        translated,
    ),
    "LED, opaque encoder": Case(
        lambda: varuna.opaque(
            hugging_face(
                "LED",
                PAIR,
                {
                    **BOTH,
                    "attention_window": 4,
                    "max_encoder_position_embeddings": 40,
                    "max_decoder_position_embeddings": 40,
                },
            )(),
            "led.encoder",
        ),
        translated,
        of_loss,
    ),
    "ProphetNet": case("ProphetNet", PAIR, PROPHET, translated),
    "ProphetNet, opaque attention": Case(
        lambda: varuna.opaque(
            hugging_face("ProphetNet", PAIR, PROPHET)(), "prophetnet.decoder.layers.*.self_attn"
        ),
        translated,
        of_loss,
    ),
    # mixtures of experts
    "Mixtral": experts("Mixtral", CAUSAL, {**GROUPED, "num_local_experts": 4}),
    "Mixtral, eager experts": experts(
        "Mixtral", CAUSAL, {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"}
    ),
    "Mixtral, opaque experts": Case(
        lambda: varuna.opaque(
            hugging_face(
                "Mixtral", CAUSAL, {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"}
            )(),
            "model.layers.*.mlp.experts",
        ),
        labelled,
        of_loss,
    ),
    "Mixtral, batched experts": experts(
        "Mixtral", CAUSAL, {**GROUPED, "num_local_experts": 4, "experts_implementation": "batched_mm"}
    ),
    "Switch Transformers": experts(
        "SwitchTransformers", PAIR, {**SWITCH, "dropout_rate": 0.0, "router_jitter_noise": 0.0}, translated
    ),
    "Switch Transformers, opaque experts": Case(
        lambda: varuna.opaque(
            hugging_face("SwitchTransformers", PAIR, SWITCH)(),
            "encoder.block.*.layer.*.mlp.experts",
            "decoder.block.*.layer.*.mlp.experts",
        ),
        translated,
        of_loss,
        by_microbatch=True,  # the tokens of the experts' dropout masks are known only at run time
        dtype=torch.float32,
    ),
    "Qwen2-MoE": experts("Qwen2Moe", CAUSAL, {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": experts("Qwen3Moe", CAUSAL, {**GROUPED, **EXPERTS, "head_dim": 8}),
    "OLMoE": experts("Olmoe", CAUSAL, {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": experts(
        "DeepseekV2",
        CAUSAL,
        {
            **GROUPED,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "DeepSeek-V3": experts(
        "DeepseekV3",
        CAUSAL,
        {
            **GROUPED,
            "num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "GPT-OSS": experts(
        "GptOss",
        CAUSAL,
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4},
    ),
    "Granite-MoE": experts(
        "GraniteMoe", CAUSAL, {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "NLLB-MoE": experts("NllbMoe", PAIR, NLLB, translated),
    "NLLB-MoE, opaque routers": Case(
        lambda: varuna.opaque(
            hugging_face("NllbMoe", PAIR, NLLB)(),
            "model.encoder.layers.*.ffn.router",
            "model.decoder.layers.*.ffn.router",
        ),
        translated,
        of_loss,
        by_microbatch=True,
        dtype=torch.float32,
    ),
    "Llama 4": experts(
        "Llama4",
        CAUSAL,
        {
            **GROUPED,
            "num_local_experts": 4,
            "head_dim": 8,
            "intermediate_size_mlp": 32,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8,
        },
        config_class="Llama4TextConfig",
    ),
    "Jamba": experts(
        "Jamba",
        CAUSAL,
        {
            **GROUPED,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    # decoders
    "GPT-2": case("GPT2", "LMHeadModel", GPT2),
    "GPT-2, no labels": case("GPT2", "LMHeadModel", GPT2, bare, of_scores),
    "GPT-2, eager attention": case("GPT2", "LMHeadModel", GPT2, attention="eager"),
    "GPT-NeoX": case("GPTNeoX", CAUSAL, STACK),
    "GPT-Neo": case(
        "GPTNeo",
        CAUSAL,
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 2,
            "intermediate_size": 32,
            "window_size": 4,
            "max_position_embeddings": 40,
        },
    ),
    "GPT-J": case("GPTJ", CAUSAL, {**GPT2, "rotary_dim": 4}),
    "OPT": case(
        "OPT",
        CAUSAL,
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "ffn_dim": 32,
            "num_attention_heads": 2,
            "max_position_embeddings": 40,
            "word_embed_proj_dim": 16,
        },
    ),
    "Bloom": case("Bloom", CAUSAL, {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 3, "n_head": 2}),
    "Falcon": case("Falcon", CAUSAL, {**STACK, "alibi": False}),
    "Falcon, alibi": case(
        "Falcon", CAUSAL, {**STACK, "alibi": True, "new_decoder_architecture": False, "multi_query": True}
    ),
    "Phi": case("Phi", CAUSAL, {**STACK, "pad_token_id": 0}),
    "Phi-3": case("Phi3", CAUSAL, {**GROUPED, "sliding_window": 4}),
    "Gemma": case("Gemma", CAUSAL, {**GROUPED, "head_dim": 8}),
    "Gemma 2": case(
        "Gemma2",
        CAUSAL,
        {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        unmasked,
    ),
    "Gemma 3": case(
        "Gemma3", CAUSAL, {**GROUPED, "head_dim": 8, "sliding_window": 4}, config_class="Gemma3TextConfig"
    ),
    "Llama": case("Llama", CAUSAL, {**GROUPED, "attention_dropout": 0.1}),
    "Llama, no labels": case("Llama", CAUSAL, GROUPED, masked, of_scores),
    "Llama, eager attention": case("Llama", CAUSAL, GROUPED, attention="eager"),
    "Llama classifier": case(
        "Llama",
        "ForSequenceClassification",
        {**GROUPED, "num_labels": 5},
        lambda n, g: ((), {"input_ids": words(n, g), "labels": torch.randint(0, 5, (n,), generator=g)}),
    ),
    "Qwen2": case(
        "Qwen2", CAUSAL, {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "Qwen3": case("Qwen3", CAUSAL, {**GROUPED, "head_dim": 8}),
    "Mistral": case("Mistral", CAUSAL, {**GROUPED, "sliding_window": 4}),
    "StableLM": case("StableLm", CAUSAL, GROUPED),
    "Cohere": case("Cohere", CAUSAL, GROUPED),
    "Starcoder2": case("Starcoder2", CAUSAL, GROUPED),
    "Granite": case("Granite", CAUSAL, GROUPED),
    "CTRL": case(
        "CTRL",
        "LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 16, "dff": 32, "n_layer": 2, "n_head": 2, "n_positions": 40},
    ),
    "MPT": case(
        "Mpt", CAUSAL, {"vocab_size": WORDS, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 40}
    ),
    # encoders
    "BERT": case("Bert", "ForMaskedLM", STACK),
    "BERT, pretraining": case(
        "Bert",
        "ForPreTraining",
        STACK,
        lambda n, g: (
            (),
            {
                "input_ids": words(n, g),
                "token_type_ids": torch.randint(0, 2, (n, LENGTH), generator=g),
                "labels": words(n, g),
                "next_sentence_label": torch.randint(0, 2, (n,), generator=g),
            },
        ),
    ),
    "BERT, no labels": case("Bert", "Model", STACK, masked, of_scores),
    "BERT, eager attention": case("Bert", "ForMaskedLM", STACK, attention="eager"),
    "BERT, questions": case(
        "Bert",
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
    "RoBERTa": case("Roberta", "ForMaskedLM", {**STACK, "pad_token_id": 1}),
    "XLM-RoBERTa": case("XLMRoberta", "ForMaskedLM", {**STACK, "pad_token_id": 1}),
    "ALBERT": case("Albert", "ForMaskedLM", {**STACK, "embedding_size": 8}),
    "DeBERTa": case(
        "Deberta", "ForMaskedLM", {**STACK, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    ),
    "DeBERTa-v2": case(
        "DebertaV2",
        "ForMaskedLM",
        {
            **STACK,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 4,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "ELECTRA": case(
        "Electra",
        "ForPreTraining",
        {**STACK, "embedding_size": 8},
        lambda n, g: (
            (),
            {"input_ids": words(n, g), "labels": torch.randint(0, 2, (n, LENGTH), generator=g)},
        ),
    ),
    "DistilBERT": case(
        "DistilBert",
        "ForMaskedLM",
        {
            "vocab_size": WORDS,
            "dim": 16,
            "n_layers": 3,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 40,
        },
    ),
    "XLNet": case(
        "XLNet", "LMHeadModel", {"vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}
    ),
    "MPNet": case("MPNet", "ForMaskedLM", {**STACK, "pad_token_id": 1}),
    "MobileBERT": case(
        "MobileBert", "ForMaskedLM", {**STACK, "embedding_size": 8, "intra_bottleneck_size": 8}
    ),
    "SqueezeBERT": case(
        "SqueezeBert",
        "ForMaskedLM",
        {
            **STACK,
            "embedding_size": 16,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
    ),
    "FNet": case("FNet", "ForMaskedLM", {**STACK, "tpu_short_seq_length": LENGTH}, unmasked),
    "Longformer": case("Longformer", "ForMaskedLM", {**STACK, "attention_window": 4, "pad_token_id": 1}),
    "Longformer, opaque encoder": Case(
        lambda: varuna.opaque(
            hugging_face("Longformer", "ForMaskedLM", {**STACK, "attention_window": 4, "pad_token_id": 1})(),
            "longformer.encoder",
        ),
        labelled,
        of_loss,
    ),
    "BigBird": case("BigBird", "ForMaskedLM", {**STACK, "attention_type": "original_full"}),
    "Funnel": case(
        "Funnel",
        "ForMaskedLM",
        {
            "vocab_size": WORDS,
            "block_sizes": [1, 1],
            "num_decoder_layers": 1,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
        },
    ),
    "ModernBERT": case(
        "ModernBert",
        "ForMaskedLM",
        {
            **STACK,
            "pad_token_id": 0,
            "local_attention": 4,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "Perceiver": case(
        "Perceiver",
        "ForMaskedLM",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "num_latents": 6,
            "d_latents": 16,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "max_position_embeddings": LENGTH,
            "qk_channels": 16,
            "v_channels": 16,
        },
    ),
    # pictures, sound, state spaces
    "ViT": case("ViT", "ForImageClassification", VISION, labelled_pictures),
    "ViT, no labels": case("ViT", "Model", VISION, bare_pictures, of_scores),
    "DINOv2": case(
        "Dinov2",
        "ForImageClassification",
        {**VISION, "mlp_ratio": 2, "drop_path_rate": 0.1},
        labelled_pictures,
    ),
    "BEiT": case(
        "Beit",
        "ForImageClassification",
        {**VISION, "use_relative_position_bias": True, "drop_path_rate": 0.1},
        labelled_pictures,
    ),
    "Swin": case(
        "Swin",
        "ForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 5,
            "drop_path_rate": 0.1,
        },
        labelled_pictures,
    ),
    "ConvNeXT": case(
        "ConvNext",
        "ForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5, "drop_path_rate": 0.1},
        labelled_pictures,
    ),
    "ResNet": case(
        "ResNet",
        "ForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "layer_type": "basic",
            "num_labels": 5,
        },
        labelled_pictures,
        by_microbatch=True,
    ),
    "RegNet": case(
        "RegNet",
        "ForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4, "num_labels": 5},
        labelled_pictures,
        by_microbatch=True,
    ),
    "MobileNetV2": case(
        "MobileNetV2",
        "ForImageClassification",
        {"depth_multiplier": 0.25, "min_depth": 4, "image_size": 64, "num_labels": 5},
        large_pictures,
        by_microbatch=True,
    ),
    "EfficientNet": case(
        "EfficientNet",
        "ForImageClassification",
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.2,
            "hidden_dim": 320,
            "image_size": 32,
            "num_labels": 5,
        },
        large_pictures,
        by_microbatch=True,
    ),
    "SegFormer": case(
        "Segformer",
        "ForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
            "num_labels": 5,
        },
        lambda n, g: (
            (),
            {"pixel_values": pictures(n, g), "labels": torch.randint(0, 5, (n, 32, 32), generator=g)},
        ),
        by_microbatch=True,
    ),
    "CLIP, features": case(
        "CLIP",
        "Model",
        {"text_config": {**STACK}, "vision_config": {**VISION}, "projection_dim": 8},
        lambda n, g: ((), {"input_ids": words(n, g), "pixel_values": pictures(n, g)}),
        lambda out: (
            out["text_embeds"].square().mean(1).mean() + (out["image_embeds"] * 2).exp().mean(1).mean()
        ),
    ),
    "CLIP, embeddings": Case(
        lambda: Embeddings(
            hugging_face(
                "CLIP", "Model", {"text_config": {**STACK}, "vision_config": {**VISION}, "projection_dim": 8}
            )()
        ),
        lambda n, g: ((), {"input_ids": words(n, g), "pixel_values": pictures(n, g)}),
        lambda out: out[0].square().mean(1).mean() + (out[1] * 2).exp().mean(1).mean(),
    ),
    "CLIP, contrastive": case(
        "CLIP",
        "Model",
        {"text_config": {**STACK}, "vision_config": {**VISION}, "projection_dim": 8},
        lambda n, g: ((), {"input_ids": words(n, g), "pixel_values": pictures(n, g), "return_loss": True}),
    ),
    "CLIP vision": case("CLIPVision", "Model", VISION, bare_pictures, of_scores),
    "Wav2Vec2": case(
        "Wav2Vec2",
        "ForSequenceClassification",
        SOUND,
        waves,
    ),
    "Wav2Vec2, layerdrop and masks": case(
        "Wav2Vec2",
        "ForSequenceClassification",
        {name: value for name, value in SOUND.items() if name not in ("mask_time_prob", "layerdrop")},
        waves,
    ),
    "HuBERT": case(
        "Hubert",
        "ForSequenceClassification",
        SOUND,
        waves,
    ),
    "Mamba": case(
        "Mamba",
        CAUSAL,
        {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        unmasked,
    ),
    "Mamba-2": case(
        "Mamba2",
        CAUSAL,
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "state_size": 4,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
        unmasked,
    ),
    "RWKV": case(
        "Rwkv",
        CAUSAL,
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 40},
        unmasked,
    ),
    "RecurrentGemma": case(
        "RecurrentGemma",
        CAUSAL,
        {**GROUPED, "lru_width": 16, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
    ),
    "time series": case(
        "TimeSeriesTransformer",
        "ForPrediction",
        {
            "prediction_length": 3,
            "context_length": 6,
            "lags_sequence": [1, 2],
            "num_time_features": 1,
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "decoder_ffn_dim": 16,
            **NO_DROP,
        },
        lambda n, g: (
            (),
            {
                "past_values": torch.randn(n, 8, generator=g).to(torch.get_default_dtype()),
                "past_time_features": torch.randn(n, 8, 1, generator=g).to(torch.get_default_dtype()),
                "past_observed_mask": torch.ones(n, 8),
                "future_values": torch.randn(n, 3, generator=g).to(torch.get_default_dtype()),
                "future_time_features": torch.randn(n, 3, 1, generator=g).to(torch.get_default_dtype()),
            },
        ),
    ),
}
