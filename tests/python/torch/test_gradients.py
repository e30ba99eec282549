"""There is no backward: no call loses a gradient silently, and autograd hears of everything that is written."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashport import lightllm  # noqa: E402
from torch_calls import CASES, FLOATS_WRITTEN, NAMES, PAIR, REFUSING, WRITTEN, WithoutExchangeApi, make  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while compiling

KINDS = pytest.mark.parametrize("kind", [None, WithoutExchangeApi], ids=["tensor", "no exchange API"])


def refused(name, argument):
    return rf"{name}: {argument} requires a gradient and there is no backward yet; call it under torch\.no_grad\(\) or "


def before_and_after(call, arguments):
    """Runs it; whether tensors among the arguments are as they were."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    before = [x.detach().clone() for x in tensors]
    call()
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(tensors, before, strict=True))


@KINDS
@pytest.mark.parametrize(("name", "argument"), CASES)
def test_an_input_that_requires_a_gradient_is_refused(name, argument, kind):
    x = make(name, kind)
    x.arguments[argument].requires_grad_()

    def call():
        with pytest.raises(NotImplementedError, match=rf"^{refused(name, argument)}torch\.inference_mode"):
            x.function(**x.arguments)

    assert before_and_after(call, x.arguments)


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_tangent_of_forward_mode_is_refused(name, argument):
    x = make(name)
    with torch.autograd.forward_ad.dual_level():
        value = x.arguments[argument]
        x.arguments[argument] = torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(NotImplementedError, match=rf"^{refused(name, argument)}"):
            x.function(**x.arguments)
    plain = make(name)
    with torch.autograd.forward_ad.dual_level():
        plain.function(**plain.arguments)  # without a tangent


@KINDS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_parameters_are_read_where_no_gradient_is_asked_for(name, guard, kind):
    x, plain = make(name, kind), make(name)
    plain.function(**plain.arguments)
    for argument in x.inputs:
        value = x.arguments[argument]
        x.arguments[argument] = torch.nn.Parameter(value) if kind is None else value.requires_grad_()
    with guard():
        x.function(**x.arguments)
    for output in x.outputs:
        assert not x.arguments[output].requires_grad
        assert torch.equal(x.arguments[output].nan_to_num(), plain.arguments[output].nan_to_num())
        assert not torch.isnan(x.arguments[output][0, :1]).all()


@pytest.mark.parametrize("name", REFUSING)
def test_frozen_parameters_are_read(name):
    x = make(name)
    for argument in x.inputs:
        x.arguments[argument] = torch.nn.Parameter(x.arguments[argument], requires_grad=False)
    x.function(**x.arguments)
    assert not torch.isnan(x.arguments[x.outputs[0]][0, :1]).all()


def test_results_made_by_the_call_require_no_gradient():
    x = make("flash_decode")
    arguments = {name: value for name, value in x.arguments.items() if name not in x.outputs}
    arguments["q"].requires_grad_()
    with torch.no_grad():
        results = x.function(**arguments, return_lse=True)
    assert [type(result) for result in results] == [torch.Tensor] * 2
    assert not any(result.requires_grad for result in results)


@KINDS
@pytest.mark.parametrize(("name", "argument"), FLOATS_WRITTEN)
def test_a_leaf_that_requires_a_gradient_is_not_written(name, argument, kind):
    x = make(name, kind)
    x.arguments[argument].requires_grad_()
    text = rf"^{name}: {argument} is written, and a leaf Variable that requires grad is being used in an in-place"

    def call():
        with pytest.raises(RuntimeError, match=text):
            x.function(**x.arguments)

    assert before_and_after(call, x.arguments)
    with torch.no_grad():
        x.function(**x.arguments)  # as torch's own operations do


@pytest.mark.parametrize("name", sorted({name for name, _ in FLOATS_WRITTEN}))
def test_what_belongs_to_a_graph_is_not_written(name):
    x = make(name)
    argument = x.outputs[0]
    x.arguments[argument] = x.arguments[argument].requires_grad_() * 2
    with pytest.raises(NotImplementedError, match=refused(name, argument)):
        x.function(**x.arguments)


@pytest.mark.parametrize("name", PAIR)
def test_lightllms_pair_runs_without_gradients_as_its_original(name):
    x, plain = make(name), make(name)
    plain.function(**plain.arguments)
    for argument in x.inputs:
        x.arguments[argument].requires_grad_()
    getattr(lightllm, name)(**x.arguments) if name == PAIR[0] else x.function(**x.arguments)
    for output in x.outputs:
        assert not x.arguments[output].requires_grad
        assert torch.equal(x.arguments[output].nan_to_num(), plain.arguments[output].nan_to_num())


@KINDS
@pytest.mark.parametrize(("name", "argument"), WRITTEN)
def test_a_write_counts_as_a_version(name, argument, kind):
    x = make(name, kind)
    before = {key: value._version for key, value in x.arguments.items() if isinstance(value, torch.Tensor)}
    x.function(**x.arguments)
    assert x.arguments[argument]._version > before[argument]
    for key, version in before.items():
        if key not in x.outputs:
            assert x.arguments[key]._version == version


def test_a_failed_call_counts_as_no_write():
    x = make("flash_decode")
    x.arguments["seqlens"][0] = 41
    with pytest.raises(ValueError, match="seqlens"):
        x.function(**x.arguments)
    assert x.arguments["out"]._version == 0


@pytest.mark.parametrize(("name", "argument"), WRITTEN)
def test_autograd_notices_that_what_it_has_saved_was_written(name, argument):
    x = make(name)
    factor = torch.ones((), requires_grad=True)
    product = factor * x.arguments[argument]
    with torch.no_grad():
        x.function(**x.arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@KINDS
def test_tensors_of_inference_mode_are_written(kind):
    with torch.inference_mode():
        x = make("append_kv", kind)
        x.function(**x.arguments)
        assert x.arguments["k_cache"].is_inference()
    x.function(**x.arguments)
    assert torch.equal(x.arguments["k_cache"].reshape(8, 2, 64)[5], x.arguments["k"][0])


def compiled(x):
    """The call as a compiled graph makes it, and its tensors."""
    tensors = {name: value for name, value in x.arguments.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in x.arguments.items() if name not in tensors}
    torch.compiler.reset()
    step = torch.compile(lambda given: x.function(**given, **rest), fullgraph=True, backend="aot_eager")
    return step, tensors


@pytest.mark.parametrize("name", REFUSING)
def test_a_compiled_call_refuses_as_well(name):
    x = make(name)
    argument = x.inputs[0]
    step, tensors = compiled(x)
    tensors[argument].requires_grad_()

    def call():
        with pytest.raises(Exception, match=refused(name, argument)):
            step(tensors)

    assert before_and_after(call, tensors)
    with torch.no_grad():
        step(tensors)
    assert not tensors[x.outputs[0]].requires_grad


@pytest.mark.parametrize("name", REFUSING)
def test_a_compiled_call_whose_results_are_new_refuses_as_well(name):
    x = make(name)
    for output in x.outputs:
        if output not in ("k_cache", "v_cache", "state"):
            del x.arguments[output]
    argument = x.inputs[0]
    step, tensors = compiled(x)
    tensors[argument].requires_grad_()
    with pytest.raises(Exception, match=refused(name, argument)):
        step(tensors)


@pytest.mark.parametrize("name", PAIR)
def test_compiled_the_pair_runs_without_gradients_too(name):
    x, plain = make(name), make(name)
    plain.function(**plain.arguments)
    step, tensors = compiled(x)
    tensors[x.inputs[0]].requires_grad_()
    step(tensors)
    for output in x.outputs:
        assert not tensors[output].requires_grad
        assert torch.equal(tensors[output].nan_to_num(), plain.arguments[output].nan_to_num())


@pytest.mark.parametrize(("name", "argument"), [case for case in FLOATS_WRITTEN if case[1] == make(case[0]).outputs[0]])
def test_a_compiled_call_writes_no_leaf_that_requires_a_gradient(name, argument):
    step, tensors = compiled(make(name))
    tensors[argument].requires_grad_()
    with pytest.raises(Exception, match="leaf Variable that requires grad"):
        step(tensors)


@pytest.mark.parametrize("name", NAMES)
def test_operators_count_versions(name):
    step, tensors = compiled(make(name))
    step(tensors)
    assert all(tensors[output]._version > 0 for output in make(name).outputs)
