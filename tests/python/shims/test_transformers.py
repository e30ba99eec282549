"""Our kernels in a small Qwen3-Next of Transformers with random weights: logits and tokens are the original's."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM  # noqa: E402

from flashport import fla  # noqa: E402
from flashport.transformers import gated_delta_rule  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Transformers' own

PROMPT, STEPS, LINEAR = 70, 64, 3
NAMES = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    assert config.layer_types == ["linear_attention"] * LINEAR + ["full_attention"]
    return Qwen3NextForCausalLM(config).eval()


def layers(model):
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


def functions(model):
    """Those that the layers call now, wherever they have them."""
    own = [vars(layer).get(name) for layer in layers(model) for name in NAMES]
    return own + [getattr(sys.modules[type(model).__module__], f"torch_{name}") for name in NAMES]


@torch.no_grad()
def greedy(model, padded=0):
    """(logits [2, 1 + steps, vocabulary], tokens [2, steps]) of two prompts, the second padded on the left."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(96, (2, PROMPT), generator=generator)
    mask = torch.ones(2, PROMPT, dtype=torch.int64)
    mask[1, :padded] = 0
    result = model(tokens, attention_mask=mask, use_cache=True)
    logits, chosen = [result.logits[:, -1]], []
    for _ in range(STEPS):
        chosen.append(logits[-1].argmax(-1, keepdim=True))
        mask = torch.cat([mask, torch.ones_like(chosen[-1])], 1)
        result = model(chosen[-1], attention_mask=mask, past_key_values=result.past_key_values, use_cache=True)
        logits.append(result.logits[:, -1])
    return torch.stack(logits, 1), torch.cat(chosen, 1)


@pytest.fixture
def calls(monkeypatch):
    """(function, tokens) of each call of ours."""
    made = []

    def count(name):
        ours = getattr(fla, name)

        def counted(q, *arguments, **keywords):
            made.append((name, q.shape[1]))
            return ours(q, *arguments, **keywords)

        monkeypatch.setattr(fla, name, counted)

    count("chunk_gated_delta_rule")
    count("fused_recurrent_gated_delta_rule")
    return made


@pytest.mark.parametrize("padded", [0, 9])
def test_logits_and_greedy_tokens_are_the_originals(model, calls, padded):
    wanted, tokens = greedy(model, padded)
    assert not calls
    with gated_delta_rule(model):
        got, ours = greedy(model, padded)
    steps = [("fused_recurrent_gated_delta_rule", 1)] * (LINEAR * STEPS)
    assert calls == [("chunk_gated_delta_rule", PROMPT)] * LINEAR + steps

    largest = wanted.abs().max().item()
    error = (got - wanted).abs().max().item()
    assert 0 < error <= 1e-4 * largest
    # Tokens say something only where the best is ahead of the next by more than the error, and are not all the same.
    first, second = wanted.topk(2).values.unbind(-1)
    assert (first - second).min() > 10 * error
    assert len(tokens.unique()) > 8
    assert torch.equal(ours, tokens)


def test_logits_of_a_whole_prompt(model):
    tokens = torch.randint(96, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = model(tokens, use_cache=False).logits
        with gated_delta_rule(model):
            got = model(tokens, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def test_the_model_has_its_own_functions_again(model):
    before = functions(model)
    with gated_delta_rule(model), gated_delta_rule(model):
        assert functions(model) != before
    assert functions(model) == before
    with pytest.raises(RuntimeError, match="on the way"), gated_delta_rule(model):
        raise RuntimeError("on the way")
    assert functions(model) == before


def test_a_gradient_is_refused(model):
    tokens = torch.arange(5)[None]
    with gated_delta_rule(model), pytest.raises(NotImplementedError, match="requires a gradient"):
        model(tokens)


def test_a_model_without_such_layers():
    with pytest.raises(ValueError, match=r"^gated_delta_rule: model must have layers .*got Linear"), \
            gated_delta_rule(torch.nn.Linear(2, 2)):  # fmt: skip
        pass


@pytest.mark.parametrize("model", [None, "Qwen3-Next", object])
def test_no_model(model):
    text = rf"^gated_delta_rule: model must be a torch.nn.Module, got {type(model).__name__}$"
    with pytest.raises(TypeError, match=text), gated_delta_rule(model):
        pass


class OlderLayer(torch.nn.Module):
    """As layers are up to Transformers 5.14: functions are attributes, q and k have a head for each value head."""

    def __init__(self):
        super().__init__()
        self.chunk_gated_delta_rule = self.recurrent_gated_delta_rule = None

    def forward(self, tokens):
        function = self.chunk_gated_delta_rule if tokens > 1 else self.recurrent_gated_delta_rule
        x = torch.arange(1.0, 1 + 2 * tokens * 3 * 16).reshape(2, 3 * 16, tokens).transpose(1, 2) / 1000
        x = x.reshape(2, tokens, 3, 16)
        gates = torch.full((2, tokens, 3), 0.5)
        return function(
            x, x, x, g=-gates, beta=gates, initial_state=torch.ones(2, 3, 16, 16), output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        ), (x, x, x, -gates, gates)  # fmt: skip


@pytest.mark.parametrize("tokens", [70, 1])
def test_layers_that_hold_their_functions(tokens):
    model = torch.nn.Sequential(OlderLayer(), OlderLayer())
    with gated_delta_rule(model):
        (out, state), arguments = model[1](tokens)
    function = fla.chunk_gated_delta_rule if tokens > 1 else fla.fused_recurrent_gated_delta_rule
    q, k, v, g, beta = (x.contiguous() for x in arguments)
    expected = function(
        q, k, v, g, beta=beta, initial_state=torch.ones(2, 3, 16, 16), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    assert torch.equal(out, expected[0])
    assert torch.equal(state, expected[1])
    assert not state.eq(1).all()
    assert all(getattr(layer, name) is None for layer in model for name in NAMES)
