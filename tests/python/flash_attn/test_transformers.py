"""Transformers' own flash_attention_2 over the drop-in: random models give the logits of eager attention."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import modeling_flash_attention_utils  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

import flashport  # noqa: E402
from flashport.flash_attn import flash_attn_interface  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mistral():
    """With a window."""
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=12))


def gemma2():
    """With a softcap."""
    config = transformers.Gemma2Config(
        **SIZES, sliding_window=12, attn_logit_softcapping=0.5, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


@pytest.fixture(params=[llama, mistral, gemma2])
def model(request):
    torch.manual_seed(3)
    return request.param().eval()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Names of the functions that ran. Transformers asks once which packages there are, and wants a GPU."""
    asked = [value for value in vars(import_utils).values() if hasattr(value, "cache_clear")]
    made = []

    def counted(name):
        function = getattr(flash_attn_interface, name)

        @functools.wraps(function)  # Transformers looks at the signature
        def run(*arguments, **options):
            made.append(name)
            return function(*arguments, **options)

        return run

    def forget():
        for function in asked:
            function.cache_clear()
        modeling_flash_attention_utils._loaded_implementation = None

    forget()
    with flashport.install_shims("flash_attn"):
        import flash_attn

        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            monkeypatch.setattr(flash_attn, name, counted(name))
        monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
        found_at_import = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", {})  # by Transformers 5.17, say
        monkeypatch.setitem(found_at_import, "flash_attn", ["flash-attn"])
        matrix = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
        monkeypatch.setitem(matrix[2], "supported_devices", ((lambda: True, "cuda"),))
        assert import_utils.is_flash_attn_2_available()
        yield made
    forget()


def logits(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


def test_prompt(model, calls):
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = logits(model, "eager", input_ids=tokens)
    got = logits(model, "flash_attention_2", input_ids=tokens)
    assert calls == ["flash_attn_func"] * 2
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, calls, side):
    tokens = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 40, dtype=torch.long)
    hidden = slice(0, 9) if side == "left" else slice(31, 40)
    mask[1, hidden] = 0
    wanted = logits(model, "eager", input_ids=tokens, attention_mask=mask)
    got = logits(model, "flash_attention_2", input_ids=tokens, attention_mask=mask)
    assert calls == ["flash_attn_varlen_func"] * 2
    torch.testing.assert_close(got[mask == 1], wanted[mask == 1], rtol=1e-4, atol=1e-4)


def test_generation(model, calls):
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    results = []
    for implementation in ("eager", "flash_attention_2"):
        model.set_attn_implementation(implementation)
        results.append(model.generate(tokens, attention_mask=torch.ones_like(tokens), **options))
    assert torch.equal(*results)
    assert len(calls) == 16
