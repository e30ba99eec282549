"""The small server of ``flashport demo serve``: bits of requests alone and together, its scheduler and its cache."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from flashport.benchmarks import harness
from flashport.cli import demo_serve, main
from flashport.cli.common import served_devices
from flashport.cli.serve import attention, check, workload
from flashport.cli.serve.arrays import NumpyArrays, TorchArrays
from flashport.cli.serve.cache import PagedCache
from flashport.cli.serve.engine import Engine
from flashport.cli.serve.model import Model, Shape
from flashport.cli.serve.scheduler import Request, Scheduler

SHAPE = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=64, vocab=97)
OPTIONS = ("--hidden", "64", "--heads", "4", "--vocab", "97", "--max-prompt", "150", "--max-new", "9")


@pytest.fixture
def one_thread():
    """Of torch, whose threads wait for each other at every small operation, long where others use the cores."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_arrays(library, fmt):
    if library == "numpy":
        return NumpyArrays(fmt)
    torch = pytest.importorskip("torch")
    gpus = [device.device for device in served_devices() if not device.is_cpu]
    if library == "torch on a GPU" and not (gpus and torch.cuda.is_available()):
        pytest.skip("needs a GPU")
    return TorchArrays(torch, gpus[0] if library == "torch on a GPU" else "cpu", fmt)


def make_engine(arrays=None, pages=40, shape=SHAPE):
    arrays = arrays or NumpyArrays("fp32")
    return Engine(arrays, Model(arrays, shape, 450, 0), PagedCache(arrays, shape, pages))


def long_requests():
    """Requests whose decoding overlaps, over more keys than one chunk of decode has."""
    rng = np.random.default_rng(0)
    return [Request(n, n, rng.integers(97, size=size), 6) for n, size in enumerate((300, 350, 400, 290))]


def problems(engine, requests, budget=128):
    """What the check finds."""
    together = engine.serve(requests, budget)
    return check.differences(together.results, check.serve_alone(engine, requests, 1).results)


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["demo", "serve", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == code, result.output + repr(result.exception)
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("library", "fmt"),
    [
        ("numpy", "fp32"), ("numpy", "fp16"), ("torch", "fp32"), ("torch", "fp16"), ("torch", "bf16"),
        ("torch on a GPU", "fp16"), ("torch on a GPU", "bf16"),
    ],
)  # fmt: skip
def test_bits_are_those_of_each_request_alone(library, fmt, monkeypatch, request):
    """Prompts token by token, in chunks that no page begins with, and whole; a page list of another order each time."""
    if library == "torch":
        request.getfixturevalue("one_thread")
    monkeypatch.setattr(check, "TOKEN_BUDGETS", (1, 5, 16, 1000))
    engine = make_engine(make_arrays(library, fmt))
    requests = workload.make_requests(9, 150, 9, SHAPE.vocab, seed=2)
    together = engine.serve(requests, token_budget=24)
    alone = check.serve_alone(engine, requests, seed=1)
    assert check.differences(together.results, alone.results) == []
    assert together.mixed_steps > 0
    assert together.steps < alone.steps
    for one in requests:
        for result in (together.results[one.number], alone.results[one.number]):
            assert len(result.tokens) == len(set(result.digests)) == one.new_tokens
    prompts = sum(len(one.prompt) for one in requests)
    new = sum(one.new_tokens for one in requests)
    assert (together.prompt_tokens, together.new_tokens) == (alone.prompt_tokens, alone.new_tokens) == (prompts, new)
    assert 0 < together.attention_seconds < together.seconds
    assert engine.model.rows_are_independent(0)


def test_prompts_longer_than_a_chunk_of_decode():
    assert problems(make_engine(pages=110), long_requests()) == []


@pytest.mark.usefixtures("one_thread")
def test_numpy_and_torch_serve_the_same_model():
    """Logits differ in their last bits, so of random weights nearly every token is the same."""
    requests = workload.make_requests(6, 60, 9, SHAPE.vocab, seed=0)
    ours, theirs = (
        make_engine(make_arrays(library, "fp32")).serve(requests, 24).results for library in ("numpy", "torch")
    )
    same = [a == b for n in ours for a, b in zip(ours[n].tokens, theirs[n].tokens, strict=True)]
    assert np.mean(same) > 0.9


def test_the_model_is_a_transformer_of_llamas_shape():
    """The first token of a prompt that is served in chunks, against the same in fp64 and in other words."""
    model = make_engine().model
    requests = [Request(0, 0, np.random.default_rng(3).integers(97, size=37), 1)]
    seen = []
    model_logits = model.logits
    model.logits = lambda *arguments: seen.append(model_logits(*arguments)) or seen[-1]
    engine = make_engine()
    engine.model = model
    engine.serve(requests, 16)

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    x = model._embedding[requests[0].prompt].astype(np.float64)
    angles = np.arange(37)[:, None] / 10000 ** (np.arange(32) / 32)
    turn = np.exp(1j * angles)[:, None]
    for weights in model._layers:
        heads = (norm(x) @ weights["qkv"]).reshape(37, 8, 64)
        turned = (heads[:, :6, :32] + 1j * heads[:, :6, 32:]) * turn
        heads[:, :6] = np.concatenate((turned.real, turned.imag), -1)
        q, k, v = heads[:, :4], heads[:, 4:6].repeat(2, 1), heads[:, 6:].repeat(2, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / 8
        scores[:, np.triu_indices(37, 1)[0], np.triu_indices(37, 1)[1]] = -np.inf
        p = np.exp(scores)
        x = x + np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(37, -1) @ weights["out"]
        gate, up = np.split(norm(x) @ weights["gate_up"], 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights["down"]
    np.testing.assert_allclose(seen[-1][0], norm(x[-1]) @ model._head, rtol=1e-4, atol=1e-4)


def mutate_decode(monkeypatch):
    right = attention.flash_decode

    def by_the_batch(q, *arguments, **options):  # as the heuristic on some devices
        return right(q, *arguments, **options | {"num_splits": len(q)})

    monkeypatch.setattr(attention, "flash_decode", by_the_batch)


def mutate_chunks(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK_SPLITS", 2)  # by the keys at the end of the chunk


def mutate_tiles(monkeypatch):
    monkeypatch.setattr(Model, "_filled", lambda self, x: x)  # a product's shape is that of the step
    monkeypatch.setattr(Model, "_tiles", lambda self, x: [x])


def mutate_norm(monkeypatch):
    right = Model._norm
    monkeypatch.setattr(Model, "_norm", lambda self, x: right(self, x) + x.mean() * 1e-3)


@pytest.mark.parametrize("mutate", [mutate_decode, mutate_chunks, mutate_tiles, mutate_norm])
def test_what_depends_on_the_batch_is_noticed(mutate, monkeypatch):
    mutate(monkeypatch)
    found = problems(make_engine(pages=110), long_requests())
    assert found
    for line in found:
        assert line.startswith("request ")
        assert "logits of new token" in line or "in the batch and" in line


def test_rows_that_depend_on_their_tile_are_noticed(monkeypatch):
    engine = make_engine()
    assert engine.model.rows_are_independent(0)
    mutate_norm(monkeypatch)
    assert not engine.model.rows_are_independent(0)


@pytest.mark.parametrize("name", ["keys", "pages"])
def test_a_read_of_what_nobody_wrote_is_noticed(name, monkeypatch):
    """One key too many, or a page that was given away too early."""
    if name == "keys":
        right = attention.StepAttention._lengths
        monkeypatch.setattr(attention.StepAttention, "_lengths", lambda self, works: right(self, works) + 1)
    else:
        right_step = Scheduler.next_step

        def next_step(self):
            step = right_step(self)
            for work in step:
                if work.running.decodes:
                    self._cache.give_back(work.running.pages[:1])
            return step

        monkeypatch.setattr(Scheduler, "next_step", next_step)
    requests = [Request(n, 0, np.arange(20 + n), 3) for n in range(3)]
    found = problems(make_engine(), requests)
    assert len(found) == 3
    assert all("are NaN in the batch" in line for line in found)


def test_the_scheduler_admits_in_order_and_gives_all_pages_back():
    """Not more tokens a step than the budget; a request that decodes goes on in every step; others wait for pages."""
    engine = make_engine(pages=12)
    sizes = (100, 150, 11, 40, 170)
    requests = [Request(n, n // 2, np.arange(size) % 97, 5) for n, size in enumerate(sizes)]
    scheduler = Scheduler(requests, engine.cache, 32)
    begun, decoding, waited = [], set(), False
    while step := scheduler.next_step():
        assert sum(work.count for work in step) <= 32
        numbers = [work.running.request.number for work in step]
        assert decoding <= set(numbers)
        assert [work.running.decodes for work in step] == sorted((w.running.decodes for w in step), reverse=True)
        owned = [page for running in scheduler._running for page in running.pages]
        assert len(owned) == len(set(owned)) == 12 - engine.cache.free_pages
        begun += [n for n in numbers if n not in begun]
        waited |= bool(scheduler._waiting) and scheduler._waiting[0].arrival < scheduler._now
        for work in step:
            gives_token, running = work.gives_token, work.running
            running.cached = work.kv_len
            if gives_token:
                running.output.append(0)
                decoding.add(running.request.number)
            if running.is_finished:
                scheduler.finish(running)
                decoding.discard(running.request.number)
    assert begun == [0, 1, 2, 3, 4]
    assert waited
    assert engine.cache.free_pages == 12


def test_free_pages_hold_nan():
    engine = make_engine(pages=12)
    engine.serve([Request(0, 3, np.arange(50), 4), Request(1, 90, np.arange(20), 2)], 16)
    assert engine.cache.most_used == 4
    assert all(np.isnan(x).all() for layer in engine.cache.layers for x in layer)


def test_a_request_that_never_fits():
    text = "request 0 needs 7 pages for 100 prompt and 5 new tokens, and the cache has 6"
    with pytest.raises(ValueError, match=text):
        make_engine(pages=6).serve([Request(0, 0, np.arange(100), 5)], 16)


def test_the_command():
    output = run("--device", "cpu", *OPTIONS)
    assert "all tokens equal: 24 of 24 requests were served alone, too" in output
    for text in ("together", "alone", "requests", "tokens/s", "attention", "%", "hold NaN", "with NumPy", "fp32"):
        assert text in output
    assert "wrong" not in output


@pytest.mark.parametrize(("checked", "text"), [(2, "2 of 6 requests were served"), (0, "nothing was compared")])
def test_a_sample(checked, text):
    output = run("--device", "cpu", "--quick", "--check", str(checked), *OPTIONS)
    assert text in output
    assert ("all tokens equal" in output) == (checked > 0)


def test_the_command_on_a_gpu():
    make_arrays("torch on a GPU", "bf16")
    output = run(*OPTIONS)
    assert "all tokens equal: 24 of 24" in output
    assert "bf16" in output
    assert "with torch" in output


@pytest.mark.usefixtures("one_thread")
def test_torch_on_the_cpu():
    output = run("--device", "cpu", "--backend", "torch", "--quick", *OPTIONS)
    assert "all tokens equal: 6 of 6" in output
    assert "bf16" in output
    assert "with torch" in output


def test_the_exit_status_says_what_is_wrong(monkeypatch):
    mutate_tiles(monkeypatch)
    output = run("--device", "cpu", "--quick", *OPTIONS, code=1)
    assert "wrong: request 0: logits of new token 0 differ" in output
    assert "all tokens equal" not in output


def test_libraries_that_depend_on_rows_are_named(monkeypatch):
    monkeypatch.setattr(Model, "rows_are_independent", lambda self, seed: False)
    output = run("--device", "cpu", "--quick", *OPTIONS, code=1)
    assert "wrong: rows of a tile depend on each other in NumPy here, whatever attention does" in output


def test_pages_that_are_kept_are_noticed(monkeypatch):
    monkeypatch.setattr(PagedCache, "give_back", lambda self, pages: self._free.extend(pages[1:]))
    output = run("--device", "cpu", "--requests", "1", "--pages", "50", *OPTIONS, code=1)
    assert "wrong: 3 pages were not given back" in output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--heads", "7"), 2, "Invalid value for --heads: 7 is no multiple of --kv-heads 2"),
        (("--dtype", "bf16"), 2, "Invalid value for --dtype: numpy has no bf16; it has fp32, fp16"),
        (("--pages", "3"), 2, "Invalid value for --pages: the longest request needs 26 pages, got 3"),
        (("--requests", "0"), 2, "0 is not in the range x>=1"),
        (("--head-dim", "20"), 1, "head_dim must be a multiple of 8 from 16 to 512, got 20"),
    ],
)
def test_wrong_options(arguments, code, text):
    assert text in run("--device", "cpu", *arguments, code=code)


def test_without_torch(monkeypatch):
    monkeypatch.setattr(harness, "find_torch", lambda device: None)
    text = "no device for the model: cpu: torch is missing or does not see it"
    assert text in run("--device", "cpu", "--backend", "torch", code=2)
    code = "import sys; sys.modules['torch'] = None; from flashport.cli import main; main(sys.argv[1:])"
    arguments = ["demo", "serve", "--device", "cpu", "--quick", *OPTIONS]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "all tokens equal: 6 of 6" in result.stdout


def test_a_gpu_without_torch_is_left_out_and_said(monkeypatch):
    cpu = next(device for device in served_devices() if device.is_cpu)
    gpu = type(cpu)("cuda:0", "a GPU", "sm90a", 132)
    monkeypatch.setattr(demo_serve, "served_devices", lambda: [gpu, cpu])
    monkeypatch.setattr(harness, "find_torch", lambda device: None)
    output = run("--quick", *OPTIONS)
    assert "without cuda:0: torch is missing or does not see it" in output
    assert "all tokens equal: 6 of 6" in output


def test_help():
    output = run("--help")
    for option in ("--device", "--backend", "--token-budget", "--pages", "--check", "--layers", "--seed", "--quick"):
        assert option in output
    assert "exit status is 1" in output


def test_options_of_demos_stand_before_or_after_their_names():
    for arguments in (("--device", "vax", "serve"), ("serve", "--device", "vax"), ("--device", "vax")):
        result = CliRunner().invoke(main, ["demo", *arguments])
        assert result.exit_code == 2
        assert "no such device: vax" in result.output
