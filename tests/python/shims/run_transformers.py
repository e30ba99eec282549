"""Small models of Transformers with random weights in bf16, beside the same models in fp32 with eager attention.

Run by hand where a GPU is: ``python tests/python/shims/run_transformers.py``. Each model runs with eager attention,
with ``flashport.transformers.register()`` and, where Transformers allows it, with ``flash_attention_2`` over the
drop-in. An error of the logits that exceeds twice that of eager attention in bf16 ends the run with status 1.
"""

from __future__ import annotations

import argparse
import sys

import torch

import flashport
import flashport.transformers

flashport.install_shims("flash_attn")  # before Transformers is imported, which may ask at once

import transformers  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

SIZES = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.05, "tie_word_embeddings": False}
LAYERS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 2}


def gemma(head_dim):
    config = GROUPED | LAYERS | {"head_dim": head_dim, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": head_dim}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config))


def gpt_oss():
    config = transformers.GptOssConfig(**GROUPED, **LAYERS, num_local_experts=1, num_experts_per_tok=1)
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "Gemma-2": lambda: gemma(64),
    "Gemma-2 D256": lambda: gemma(256),
    "GPT-OSS": gpt_oss,
    "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, initializer_range=0.05)),
}


@torch.no_grad()
def logits(model, implementation, tokens, mask):
    """Of all tokens at once, and of the last 40 one by one on a cache where the model has one."""
    model.set_attn_implementation(implementation)
    whole = model(tokens, attention_mask=mask).logits[mask.bool()]
    if isinstance(model, transformers.BertForMaskedLM):
        return [whole]
    steps, cache = 40, transformers.DynamicCache(config=model.config)
    begin = tokens.shape[1] - steps
    model(tokens[:, :begin], attention_mask=mask[:, :begin], past_key_values=cache)
    each = [
        model(tokens[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits
        for i in range(begin, begin + steps)
    ]
    return [whole, torch.cat(each, 1)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    flashport.transformers.register()
    implementations = ["eager", "portable_attention"]
    implementations += ["flash_attention_2"] if import_utils.is_flash_attn_2_available() else []
    print(f"{device}, torch {torch.__version__}, transformers {transformers.__version__}; largest errors of logits")
    failed = False
    for name, make in MODELS.items():
        torch.manual_seed(3)
        model = make().eval().to(device)
        tokens = torch.randint(512, (3, 300), device=device)
        mask = torch.ones_like(tokens)
        mask[1, :77] = 0  # padding on the left
        wanted = logits(model, "eager", tokens, mask)
        model = model.to(torch.bfloat16)
        errors = {}
        for implementation in implementations:
            if implementation == "flash_attention_2" and name == "GPT-OSS":
                continue  # Transformers refuses: FlashAttention-2 has no sinks
            got = logits(model, implementation, tokens, mask)
            errors[implementation] = [(a.float() - b).abs().max().item() for a, b in zip(got, wanted, strict=True)]
        for implementation, each in errors.items():
            good = all(e <= 2 * eager for e, eager in zip(each, errors["eager"], strict=True))
            failed |= not good
            shown = " ".join(f"{e:.4f}" for e in each)
            print(f"{name:12} {implementation:20} {shown:16} {'good' if good else 'TOO LARGE'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
