"""Random models of many families, below 100,000 parameters, built in memory for the tests.

Sizes are the same wherever a family allows it: 2 layers, hidden size 32, 4 query heads over 2 KV heads of size 8,
256 positions, and windows of 8 tokens, shorter than the tests' texts. What makes a family special is kept: alternating
layer types, soft caps, sinks, latent attention, shared and routed experts, ALiBi, scaling constants.
"""

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

WINDOW = 8
POSITIONS = 256
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_WINDOWED = {"sliding_window": WINDOW}
_ALTERNATING = {**_WINDOWED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED_EXPERTS = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# family: (configuration class, what differs from _SIZES; None removes a size that the class does not know)
_FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", _WINDOWED),
    "gemma2": (
        "Gemma2Config",
        {
            **_ALTERNATING,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 20.0,
            "attn_implementation": "eager",  # sdpa, the older releases' default, ignores the soft cap
        },
    ),
    "gemma3": ("Gemma3TextConfig", {**_ALTERNATING, "query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),
    "phi3": ("Phi3Config", {**_WINDOWED, "original_max_position_embeddings": POSITIONS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4, "head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_SHARED_EXPERTS,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": POSITIONS // 32,
            },
        },
    ),
    "glm4_moe": ("Glm4MoeConfig", {**_SHARED_EXPERTS, "head_dim": 8, "use_qk_norm": True}),
    "olmo2": ("Olmo2Config", {}),
    "cohere2": ("Cohere2Config", {**_ALTERNATING, "logit_scale": 1.0}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {"ffn_hidden_size": 48, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "starcoder2": ("Starcoder2Config", _WINDOWED),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.8,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def tiny(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, vocab: int = 97) -> PreTrainedModel:
    """A random model of `family` (one of FAMILIES) in eval mode, the same one for the same arguments.

    Weights are large enough (matrices of standard deviation 0.3, biases and norms moved by 0.1) that logits differ by
    whole units between tokens and depend on the whole prefix. There is no end-of-text token; the pad token is 0.
    """
    class_name, changes = _FAMILIES[family]
    ids = {"vocab_size": vocab, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = getattr(transformers, class_name)(**_SIZES | changes | ids)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        # transformers' grouped expert kernels have no float64
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()
