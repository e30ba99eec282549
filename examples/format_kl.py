"""What formats of the cache do to a model: the KL divergence of its logits from those over fp16 caches, format by
format, of a Llama of Transformers with random weights. Needs torch and transformers.

    python examples/format_kl.py --markdown

The prompt and the tokens after it are random, and the same for all caches. The prompt's own attention is exact; its
keys go into the caches as all others do.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import transformers

import flashport

# (format of keys, of values, how many values share a factor beside the rows: None has none)
FORMATS = [
    ("fp16", "fp16", None), ("q8_0", "q8_0", None), ("q8_0", "q4_0", None), ("q4_0", "q8_0", None),
    ("q5_1", "q5_1", None), ("q5_0", "q5_0", None), ("q4_1", "q4_1", None), ("q4_0", "q4_0", None),
    ("iq4_nl", "iq4_nl", None), ("int8", "int8", 8), ("int8", "int8", 64), ("int8", "int4", 8), ("int4", "int4", 8),
    ("fp8_e4m3", "fp8_e4m3", None), ("fp8_e4m3", "fp8_e4m3", 64), ("fp8_e4m3fnuz", "fp8_e4m3fnuz", None),
    ("fp8_e5m2", "fp8_e5m2", None), ("fp8_e5m2", "fp8_e5m2", 64), ("bf16", "bf16", None),
]  # fmt: skip
WINDOWS = {
    "all but the newest": {"hot_tokens": 1, "spill_tokens": 1},
    "first 4 and newest 64 in fp16": {"hot_tokens": 64, "spill_tokens": 16, "sink_tokens": 4},
}

_caches: dict[int, flashport.MixedKVCache] = {}
_options: dict[str, Any] = {}


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attention of new tokens in Transformers' form, (batch, heads, tokens, dim), over the layer's own cache."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    if module.layer_idx not in _caches:
        batch, _, heads, dim = k.shape
        _caches[module.layer_idx] = flashport.MixedKVCache(k.half(), batch, heads, dim, **_options)
    cache = _caches[module.layer_idx]
    cache.append(k.half(), v.half())
    if q.shape[1] > 1:  # the prompt, which has all of its keys
        return flashport.attention(q, k, v, causal=True, softmax_scale=scaling), None
    return cache.attend(q, softmax_scale=scaling), None


def logits_of(model: Any, prompt: torch.Tensor, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    """(batch, tokens, vocab) logits of tokens after a prompt, one by one."""
    _caches.clear()
    _options.clear()
    _options.update(options, max_tokens=prompt.shape[1] + tokens.shape[1])
    found = []
    with torch.no_grad():
        for begin, ids in [(0, prompt), *((prompt.shape[1] + i, tokens[:, i : i + 1]) for i in range(tokens.shape[1]))]:
            positions = begin + torch.arange(ids.shape[1])[None]
            found.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, -1:])
    return torch.cat(found[1:], dim=1)


def divergence(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(batch, tokens) KL divergence in nats of the softmax of ``other`` from that of ``logits``."""
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (logits, other))
    return (p.exp() * (p - q)).sum(dim=-1)


def make_model(layers: int) -> Any:
    """A Llama with random weights, whose tokens are neither sure nor all alike."""
    transformers.AttentionInterface.register("mixed_cache", attend)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, initializer_range=0.08, tie_word_embeddings=False,
        max_position_embeddings=4096, attn_implementation="mixed_cache",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def measure(layers: int, prompt: int, new: int, formats: list[tuple[str, str, int | None]]) -> list[tuple[str, ...]]:
    """Rows of the table."""
    model = make_model(layers)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 1024, (2, prompt + new), generator=generator)
    exact = logits_of(model, ids[:, :prompt], ids[:, prompt:], k_format="fp16", v_format="fp16")
    entropy = float(-(torch.softmax(exact, -1) * torch.log_softmax(exact, -1)).sum(-1).mean())
    print(f"{layers} layers, a prompt of {prompt} tokens, {new} tokens measured; mean entropy {entropy:.2f} nats")
    rows = []
    for window, options in WINDOWS.items():
        for k_format, v_format, shared in formats:
            own = {"k_format": k_format, "v_format": v_format, "k_scale_dims": shared, "v_scale_dims": shared}
            given = logits_of(model, ids[:, :prompt], ids[:, prompt:], **own, **options)
            kl = divergence(exact, given)
            same = (exact.argmax(-1) == given.argmax(-1)).float().mean()
            figures = f"{float(kl.mean()):.1e}", f"{float(kl.max()):.1e}", f"{100 * same:.1f} %"
            rows.append((window, k_format, v_format, "-" if shared is None else str(shared), *figures))
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--markdown", action="store_true", help="a table as docs/numerics.md has it")
    given = parser.parse_args()
    rows = measure(given.layers, given.prompt, given.tokens, FORMATS)
    headings = ("window", "keys", "values", "values a factor", "mean KL", "largest KL", "same likeliest token")
    if given.markdown:
        rows = [headings, tuple("---" for _ in headings), *rows]
        print("\n".join(f"| {' | '.join(row)} |" for row in rows))
        return
    for row in (headings, *rows):
        print("".join(f"{cell:<{32 if i == 0 else 17}}" for i, cell in enumerate(row)))


if __name__ == "__main__":
    main()
