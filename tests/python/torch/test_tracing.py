"""Whoever traces or transforms a program of torch finds the operators in it, and no constant in their place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import flashport  # noqa: E402
from flashport import _core  # noqa: E402
from flashport.torch import attention, decode, gated_delta, library, mixed, quantize  # noqa: E402, F401
from torch_calls import NAMES, make  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while compiling

OUT = [
    "attention_append_out",
    "attention_out",
    "dequantize_kv_out",
    "dropout_mask_out",
    "flash_decode_mixed_out",
    "flash_decode_out",
    "flash_decode_segments_out",
    "merge_state_out",
    "merge_states_out",
    "quantize_kv_out",
]
RETURNING = {name.removesuffix("_out") for name in OUT} & set(NAMES)  # new results where none are given
OPERATORS = sorted([*NAMES, *OUT, "append_kv_scaled", "flash_decode_segments", "gated_delta_packed_decode"])


def tensors(x):
    """The tensors among the arguments, and the call with others in their place."""
    given = {name: value for name, value in x.arguments.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in x.arguments.items() if name not in given}

    def call(*values):
        return x.function(**dict(zip(given, values, strict=True)), **rest)

    return call, list(given.values())


def without_results(x):
    """The same call, whose results are new."""
    for name in x.outputs:
        if name not in ("k_cache", "v_cache", "state", "mid_out", "mid_out_logsumexp", "Out", "final_states"):
            del x.arguments[name]
    return x


def nodes(graph):
    return [str(node.target) for node in graph.graph.nodes if "flashport" in str(node.target)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(name, mode):
    call, values = tensors(make(name))

    def step(*given):
        call(*given)
        return [x + 1 for x in given]

    graph = make_fx(step, tracing_mode=mode)(*(x.clone() for x in values))
    assert len(nodes(graph)) == 1
    assert name in nodes(graph)[0]
    copies = [x.clone() for x in values]
    for got, wanted in zip(graph(*values), step(*copies), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [*sorted(RETURNING), "gated_delta_update"])
def test_make_fx_over_tensors_that_the_program_holds(name):
    """Results are not constants, also where all arguments are."""
    call, values = tensors(without_results(make(name)))
    graph = make_fx(lambda x: (x, call(*values)))(torch.zeros(1))
    assert len(nodes(graph)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors(name):
    call, values = tensors(without_results(make(name)))
    wanted = call(*(x.clone() for x in values))
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in values]
    for guard in (mode, FakeTensorMode(allow_non_fake_inputs=True)):  # also where the mode is not theirs, or is left
        if guard is mode:
            with guard:
                got = call(*fakes)
        else:
            got = call(*fakes)
        pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
        for one, other in pairs:
            if other is not None:
                assert isinstance(one, FakeTensor)
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_vmap():
    o, lse = torch.randn(5, 2, 3, 4, 16), torch.randn(5, 2, 3, 4)
    got = torch.func.vmap(flashport.merge_states)(o, lse)
    for place, (one, other) in enumerate(zip(o, lse, strict=True)):
        for part, wanted in zip(got, flashport.merge_states(one, other), strict=True):
            assert torch.equal(part[place], wanted)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vjp"])
def test_a_transformation_that_differentiates_is_refused(transform):
    o, lse = torch.randn(2, 3, 16), torch.randn(2, 3)

    def loss(o):
        return flashport.merge_states(o, lse)[0].sum()

    run = {
        "grad": lambda: torch.func.grad(loss)(o),
        "jvp": lambda: torch.func.jvp(loss, (o,), (o,)),
        "vjp": lambda: torch.func.vjp(loss, o),
    }
    with pytest.raises(NotImplementedError, match=r"^merge_states: o requires a gradient and there is no backward yet"):
        run[transform]()


def test_functionalize():
    o, lse = torch.randn(2, 3, 16), torch.randn(2, 3)
    got = torch.func.functionalize(flashport.merge_states)(o, lse)
    assert all(map(torch.equal, got, flashport.merge_states(o, lse)))


class Watch(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_a_mode_sees_one_operator_and_the_same_results(name):
    x, plain = make(name), make(name)
    plain.function(**plain.arguments)
    with Watch() as outer, Watch() as inner:
        x.function(**x.arguments)
    for watch in (outer, inner):
        assert [seen.removesuffix(".default").removesuffix("_out") for seen in watch.seen if name in seen] == [name]
    for output in x.outputs:
        torch.testing.assert_close(x.arguments[output], plain.arguments[output], rtol=0, atol=0, equal_nan=True)


def test_a_kernel_runs_where_python_is_left_out():
    """A mode lies on the stack while somebody runs kernels beneath it."""
    x, plain = make("flash_decode"), make("flash_decode")
    plain.function(**plain.arguments)
    call, values = tensors(x)
    with FakeTensorMode(), torch._C._DisableTorchDispatch():
        call(*values)
    assert torch.equal(x.arguments["out"], plain.arguments["out"])


def test_sizes_are_asked_for_while_torch_traces():
    x = make("flash_decode")
    cache = [x.arguments[name] for name in ("q", "k_cache", "v_cache", "seqlens")]
    wanted = flashport.decode_workspace_size(*cache)
    with Watch():
        assert flashport.decode_workspace_size(*cache) == wanted


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def told(way, text):
    """What an error says: a torch that is older tells nobody what the code that it compiles has raised."""
    return "Observed exception" if way == "compile" and TORCH < (2, 9) else text


def eager_and_traced(x):
    """The call as it is made while torch traces it, in four ways."""
    call, values = tensors(x)
    torch.compiler.reset()

    class Module(torch.nn.Module):
        def forward(self, *given):
            call(*given)
            return given[0] + 1

    return {
        "make_fx": lambda: make_fx(call)(*values),
        "mode": lambda: _under_mode(call, values),
        "compile": lambda: torch.compile(call, fullgraph=True, backend="eager")(*values),
        "export": lambda: torch.export.export(Module(), tuple(values), strict=False),
    }


def _under_mode(call, values):
    with Watch():
        return call(*values)


WAYS = pytest.mark.parametrize("way", ["make_fx", "mode", "compile", "export"])


@WAYS
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_refused_and_not_dropped(name, way):
    x = make(name)
    x.arguments["stream"] = 0
    x.function(**x.arguments)
    text = rf"{name}: stream must be None while torch compiles or traces the call, .* got int; call it under torch"
    with pytest.raises(Exception, match=told(way, text)):
        eager_and_traced(x)[way]()


@WAYS
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("flash_decode", {"window": (1, 2, 3)}, r"window must be a tuple \(left, right\), got \(1, 2, 3\)"),
        ("flash_decode", {"window": 5}, r"window must be a tuple \(left, right\), got 5"),
        ("flash_decode", {"window": [1, 2]}, r"window must be a tuple \(left, right\), got \[1, 2\]"),
        ("flash_decode", {"window": (True, 2)}, r"window\[0\] must be an integer, got bool"),
        ("attention", {"window": 5}, r"window must be a tuple \(left, right\), got 5"),
        ("attention", {"window": (True, 2)}, r"window\[0\] must be an integer, got bool"),
        ("attention", {"causal": 1}, "causal must be True or False, got int"),
        ("attention", {"return_lse": 1}, "return_lse must be True or False, got int"),
        ("attention", {"dropout_p": True}, "dropout_p must be a number, got bool"),
        ("attention", {"max_seqlen_q": True}, "max_seqlen_q must be an integer, got bool"),
        ("dropout_mask", {"dropout_p": True}, "dropout_p must be a number, got bool"),
        ("flash_decode", {"softmax_scale": True}, "softmax_scale must be a number, got bool"),
        ("flash_decode", {"max_q_len": True}, "max_q_len must be an integer, got bool"),
        ("merge_states", {"lse_base": True}, "lse_base must be a number, got bool"),
        ("gated_delta_update", {"softplus_beta": True}, "softplus_beta must be a number, got bool"),
        ("flash_decode", {"return_lse": 1}, "return_lse must be True or False, got int"),
        ("gated_delta_update", {"is_kda": 0}, "is_kda must be True or False, got int"),
        ("gated_delta_update", {"update_state": 1}, "update_state must be True or False, got int"),
        ("gated_delta_chunk", {"beta_sigmoid": 1.0}, "beta_sigmoid must be True or False, got float"),
    ],
)
def test_traced_calls_check_what_eager_ones_check(name, change, text, way):
    x = make(name)
    x.arguments |= change
    with pytest.raises(TypeError, match=rf"^{name}: {text}"):
        x.function(**x.arguments)
    with pytest.raises(Exception, match=told(way, rf"{name}: {text}")):
        eager_and_traced(x)[way]()


def test_every_operator_is_known_here():
    assert sorted(name for name in dir(torch.ops.flashport) if name in OPERATORS) == OPERATORS
    assert sorted(library.OPERATORS) == OPERATORS


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name):
    function = name.removesuffix("_out").removesuffix("_scaled")
    x = make(function)
    if name in RETURNING:
        x = without_results(x)
    operator = getattr(torch.ops.flashport, name).default
    defaults = {"kv_layout": "NHD", "window_left": -1, "window_right": -1, "softcap": 0.0, "return_lse": True}
    segments = x.arguments.pop("segments", [])
    for field in flashport.KvSegment._fields if segments else ():
        x.arguments[field] = [getattr(segment, field) for segment in segments]
        if field.endswith("_format"):
            x.arguments[field] = [value or "" for value in x.arguments[field]]
    given = []
    for argument in operator._schema.arguments:
        value = x.arguments.get(argument.name, defaults.get(argument.name))
        if argument.name.startswith("window_") and "window" in x.arguments:
            value = x.arguments["window"][argument.name == "window_right"]
        given.append(value)
    results = torch.library.opcheck(operator, tuple(given))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def test_run_kernel_takes_the_name_of_an_operation():
    for wrong in ((), (1,), ("no_such",)):
        with pytest.raises(TypeError):
            _core.run_kernel(*wrong)
    with pytest.raises(TypeError, match="merge_states: expected 6 arguments by position, got 1"):
        _core.run_kernel("merge_states", 1)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 does not trace subclasses of named tuples")
def test_compiled_calls_of_segments():
    x = make("flash_decode_segments")
    q, segments, mask = x.arguments["q"], x.arguments["segments"], x.arguments["mask"]

    def step(q, old, hot, mask):
        return flashport.flash_decode_segments(q * 1, [old, hot], mask=mask, return_lse=True)

    wanted = step(q, *segments, mask)
    for got, want in zip(torch.compile(step, fullgraph=True, backend="eager")(q, *segments, mask), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 does not trace subclasses of named tuples")
def test_compiled_calls_by_segment():
    q, k, v = (torch.randn(2, n, 2, 64) for n in (1, 90, 90))
    old = flashport.KvSegment(*(flashport.quantize_kv(x, "q8_0") for x in (k, v)), k_format="q8_0", v_format="q8_0")
    hot = flashport.KvSegment(k[:, :40].contiguous(), v[:, :40].contiguous())

    def step(q, by_segment):
        return flashport.flash_decode_segments(q * 1, [old, hot], by_segment=by_segment, return_lse=True)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    results = [step(q[:, 0], by_segment) for by_segment in (False, True)]
    for by_segment, wanted in enumerate(results):
        for got, want in zip(compiled(q[:, 0], bool(by_segment)), wanted, strict=True):
            assert torch.equal(got, want)
    assert any(not torch.equal(*both) for both in zip(*results, strict=True))  # in their last bits


def test_a_gradient_of_a_segment_is_refused():
    x = make("flash_decode_segments")
    x.arguments["segments"][1].k.requires_grad_()
    text = r"^flash_decode_segments: segments\[1\]: k requires a gradient and there is no backward yet"
    with pytest.raises(NotImplementedError, match=text):
        x.function(**x.arguments)
