"""Writes a tiny Qwen2-shaped model with real, random weights; adapters and a tokenizer for it.

Its weights are larger than a fresh model's, so that attention depends on what lies in the KV
cache: one wrong block changes log-probabilities.
"""

from __future__ import annotations

import sys
from pathlib import Path


def write_model(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
) -> None:
    """A checkpoint of about 5 MB in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=head_dim * heads,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.fill_(1.0)
            elif "embed" in name:
                weights.normal_(0, 1.0)
            elif name.endswith("bias"):
                weights.normal_(0, 0.3)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                weights.normal_(0, gain / weights.shape[1] ** 0.5)
    model.save_pretrained(path, safe_serialization=True)


def write_adapter(path: Path, *, seed: int, layers: int = 4, hidden: int = 128) -> None:
    """A LoRA adapter for the model above, in PEFT's format."""
    import json

    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    rank = 8
    tensors = {}
    for layer in range(layers):
        for name, out in (("q_proj", hidden), ("v_proj", hidden // 2)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def write_tokenizer(path: Path) -> None:
    """A word for each token of the model's vocabulary; its server wants to know some."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(2048)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2").save_pretrained(path)


if __name__ == "__main__":
    what, path, *seeds = sys.argv[1:]
    if what == "adapters":
        for name in seeds:
            write_adapter(Path(path, name), seed=int(name.partition("-")[0]))
    else:
        {"model": write_model, "tokenizer": write_tokenizer}[what](Path(path))
