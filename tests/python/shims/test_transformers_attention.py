"""Our attention in small models of Transformers with random weights: logits are those of its eager attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import flashport  # noqa: E402
import flashport.transformers  # noqa: E402
from flashport import _transformers_attention as registered  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, "tie_word_embeddings": False}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def gemma2():
    """A window in every other layer, and a softcap."""
    config = transformers.Gemma2Config(
        **GROUPED, sliding_window=12, attn_logit_softcapping=0.5, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def gemma2_at_256():
    """With its own head_dim, scale and softcap."""
    config = transformers.Gemma2Config(
        **GROUPED | {"head_dim": 256}, sliding_window=12, attn_logit_softcapping=50.0, query_pre_attn_scalar=256,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss():
    """Sinks, and a window in every other layer."""
    config = transformers.GptOssConfig(
        **GROUPED, sliding_window=12, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def bert():
    """An encoder: every token sees every other one."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, initializer_range=0.2))


MODELS = {"Llama": llama, "Gemma-2": gemma2, "Gemma-2 of 256": gemma2_at_256, "GPT-OSS": gpt_oss, "BERT": bert}
DECODERS = ["Llama", "Gemma-2", "Gemma-2 of 256", "GPT-OSS"]


@pytest.fixture(scope="module")
def models():
    """By name; each is made once."""
    flashport.transformers.register()
    made = {}
    for name, make in MODELS.items():
        torch.manual_seed(3)
        made[name] = make().eval()
    return made


@pytest.fixture
def calls(monkeypatch):
    """Keyword arguments of each call of ours."""
    made = []
    ours = registered.attention

    def counted(*arguments, **keywords):
        made.append(keywords)
        return ours(*arguments, **keywords)

    monkeypatch.setattr(registered, "attention", counted)
    return made


def tokens(*shape, seed=0):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(seed))


def both(model, run):
    """What ``run(model)`` gives with eager attention and with ours."""
    found = []
    for implementation in ("eager", "portable_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(run(model))
    return found


def expect_equal(found, where=...):
    wanted, got = (x[where].float() for x in found)
    largest = wanted.abs().max().item()
    assert largest > 0.1
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt(models, calls, name):
    expect_equal(both(models[name], lambda model: model(tokens(2, 50)).logits))
    assert len(calls) == SMALL["num_hidden_layers"]
    assert all(call["bias"] is None for call in calls)  # no mask of all pairs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(models, calls, name, side):
    mask = torch.ones(3, 40, dtype=torch.int64)
    for row, count in enumerate((0, 7, 25)):
        mask[row, :count] = 0
    mask = mask if side == "left" else mask.flip(1)
    expect_equal(both(models[name], lambda model: model(tokens(3, 40), attention_mask=mask).logits), mask.bool())
    if side == "left" or name == "BERT":
        assert all("seqused_k" in call for call in calls)
    else:
        assert all(call["bias"] is not None for call in calls)


@pytest.mark.parametrize("name", MODELS)
def test_padding_inside(models, calls, name):
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, 10:20] = 0
    expect_equal(both(models[name], lambda model: model(tokens(2, 40), attention_mask=mask).logits), mask.bool())
    assert all(call["bias"] is not None for call in calls)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [0, 9])
def test_greedy_tokens(models, name, cache, padded):
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[1, :padded] = 0

    def generate(model):
        result = model.generate(
            tokens(2, 30), attention_mask=mask, max_new_tokens=20, do_sample=False, output_logits=True, pad_token_id=0,
            return_dict_in_generate=True, cache_implementation=cache, disable_compile=True,
        )  # fmt: skip
        return result.sequences, torch.stack(result.logits, 1)

    (wanted, wanted_logits), (got, got_logits) = both(models[name], generate)
    expect_equal((wanted_logits, got_logits))
    assert torch.equal(got, wanted)
    assert len(got[:, 30:].unique()) > 4


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_two_parts(models, name):
    def run(model):
        cache = model(tokens(2, 50)[:, :33], use_cache=True).past_key_values
        return model(tokens(2, 50)[:, 33:], past_key_values=cache).logits

    expect_equal(both(models[name], run))


@pytest.mark.parametrize("name", ["Llama", "Gemma-2"])  # GPT-OSS of Transformers does not keep sequences apart
@pytest.mark.parametrize("told", [True, False])
def test_packed_sequences(models, calls, name, told):
    """One row of several prompts: by their offsets, or by positions alone, from which Transformers makes a mask."""
    lens = (20, 3, 27)
    positions = torch.cat([torch.arange(length) for length in lens])[None]
    offsets = torch.tensor([0, 20, 23, 50])
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 27, "max_length_k": 27}
    options = lengths if told else {}

    def run(model):
        ours = model.config._attn_implementation == "portable_attention"
        return model(tokens(1, 50), position_ids=positions, use_cache=False, **(options if ours else {})).logits

    found = both(models[name], run)
    expect_equal(found)
    assert all(("cu_seqlens_q" in call) == told for call in calls)
    with torch.no_grad():
        alone = models[name](tokens(1, 50)[:, 23:], use_cache=False).logits
    torch.testing.assert_close(found[1][:, 23:], alone, rtol=0, atol=1e-4)


def direct(mask, **options):
    """Ours and the same by torch: causal attention of 6 queries and 9 keys with this mask."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, tokens, 16, generator=generator) for heads, tokens in ((4, 6), (2, 9), (2, 9)))
    module = torch.nn.Module()
    out, weights = registered.attention_forward(module, q, k, v, mask, scaling=0.3, **options)
    assert weights is None
    return q, k, v, out


def by_torch(q, k, v, bias):
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3, enable_gqa=True)
    return out.nan_to_num().transpose(1, 2)


SPANS = torch.tensor([[0, 2], [9, 7]], dtype=torch.int32)[..., None, None]


def seen(first, end, window=9):
    """[6, 9]: the last of six queries stands at the key before ``end``."""
    position, key = torch.arange(6)[:, None] + end - 6, torch.arange(9)
    return (key >= first) & (key < end) & (key <= position) & (key > position - window)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("spans", [None, SPANS])
def test_position_biases_with_spans_and_windows(spans, biased, window):
    bias = torch.randn(1, 4, 6, 9, generator=torch.Generator().manual_seed(6)) if biased else None
    q, k, v, out = direct(spans, position_bias=bias, sliding_window=window)
    ends = [(0, 9), (0, 9)] if spans is None else [(0, 9), (2, 7)]
    visible = torch.stack([seen(*each, window or 9) for each in ends])[:, None]
    wanted = torch.zeros(2, 4, 6, 9).masked_fill(~visible, -torch.inf) + (0 if bias is None else bias)
    torch.testing.assert_close(out, by_torch(q, k, v, wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_masks_of_all_pairs(dtype):
    """Numbers are added as they are; causality and windows are in the mask."""
    mask = torch.rand(2, 1, 6, 12, generator=torch.Generator().manual_seed(7)) < 0.7
    given = mask if dtype == torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    q, k, v, out = direct(given, sliding_window=2)
    bias = torch.zeros(2, 1, 6, 9).masked_fill(~mask[..., :9], -torch.inf)
    torch.testing.assert_close(out, by_torch(q, k, v, bias), rtol=1e-5, atol=1e-5)


def test_dropout_draws_from_torchs_generator():
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(direct(None, dropout=0.4)[-1])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


class Config:
    """Of a layer with a window, and of one with chunks."""

    def __init__(self, sliding_window=None, attention_chunk_size=None):
        self.sliding_window, self.attention_chunk_size = sliding_window, attention_chunk_size


@pytest.mark.parametrize(
    ("config", "options", "wanted"),
    [
        (Config(), {}, "none"),
        (Config(5), {"local_size": 5}, "none"),
        (Config(None, 5), {"local_size": 5}, "pairs"),
        (Config(5, 5), {"local_size": 5}, "pairs"),
        (Config(), {"allow_is_causal_skip": False}, "pairs"),
        (Config(), {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}, "none"),
        (Config(5), {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True, "local_size": 5}, "pairs"),
        (Config(), {"kv_length": 12}, "spans"),
        (Config(), {"kv_length": 12, "q_offset": 4}, "none"),
        (Config(), {"kv_length": 12, "q_offset": 6}, "pairs"),
        (Config(), {"kv_length": 12, "q_offset": torch.tensor(4)}, "pairs"),
    ],
)
def test_which_masks_are_made(config, options, wanted):
    from transformers import masking_utils

    window = options.get("local_size")
    function = (
        masking_utils.sliding_window_causal_mask_function(window) if window else masking_utils.causal_mask_function
    )
    arguments = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": function, "config": config, **options}
    mask = registered.make_mask(**arguments)
    found = "none" if mask is None else "spans" if mask.dtype == torch.int32 else "pairs"
    assert found == wanted
    if found == "spans":
        assert mask.flatten().tolist() == [0, 0, 8, 8]


def test_a_gradient_is_refused(models):
    models["Llama"].set_attn_implementation("portable_attention")
    with pytest.raises(NotImplementedError, match=r"^attention: q requires a gradient and there is no backward yet"):
        models["Llama"](tokens(1, 5))


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (5, TypeError, "name must be a str, got int"),
        ("flashport", ValueError, 'name must be none of Transformers\' own and have neither "flash" nor "/" in it'),
        ("a/b", ValueError, "name must be none of"),
        ("sdpa", ValueError, 'name must be none of .*, got "sdpa"'),
    ],
)
def test_wrong_names(name, error, text):
    with pytest.raises(error, match=f"^register: {text}"):
        flashport.transformers.register(name)
