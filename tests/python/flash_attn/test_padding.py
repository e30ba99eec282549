"""bert_padding: batches with padding as packed sequences and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flashport.flash_attn import bert_padding  # noqa: E402

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]])
UNUSED = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]])


def hidden(*shape):
    return torch.randn(3, 5, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_there_and_back(shape, dtype):
    x = hidden(*shape)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK.to(dtype))
    assert torch.equal(packed, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 2, 11, 13, 14]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 3, 3, 6], torch.int32)
    assert (longest, type(longest)) == (3, int)
    assert (used.tolist(), used.dtype) == ([3, 0, 3], torch.int32)
    back = bert_padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, torch.where(MASK.bool().reshape(3, 5, *[1] * len(shape)), x, 0))


def test_tokens_that_are_kept_and_unused():
    x = hidden(4)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, MASK, UNUSED)
    assert torch.equal(packed, x[(MASK + UNUSED).bool()])
    assert indices.tolist() == [0, 1, 2, 3, 11, 12, 13, 14]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 4, 8], 4, [3, 0, 3])


def test_concatenated_sequences():
    x = hidden(4)
    lengths = torch.tensor([[2, 3, 0, 0, 0], [1, 2, 0, 0, 0], [4, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest) == ([0, 2, 5, 6, 8, 12], torch.int32, 4)


def test_gradients():
    x = hidden(4).requires_grad_()
    packed, indices, *_ = bert_padding.unpad_input(x, MASK)
    (2 * bert_padding.pad_input(packed, indices, 3, 5)).sum().backward()
    assert torch.equal(x.grad, 2.0 * MASK[..., None].expand(3, 5, 4))


def test_rows():
    x, indices = hidden(2).flatten(0, 1), torch.tensor([4, 0, 4])
    assert torch.equal(bert_padding.index_first_axis(x, indices), x[indices])
    rows, whole = bert_padding.index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices])
    assert whole is x
    put = bert_padding.index_put_first_axis(torch.ones(2, 3), torch.tensor([3, 1]), 4)
    assert put.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
