"""bert_padding: batches with padding as packed sequences and back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from flash_attn_errors import expect_refusal  # noqa: E402
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


def test_classes():
    """What the functions are called by in flash-attn."""
    x, indices = hidden(2).flatten(0, 1).requires_grad_(), torch.tensor([4, 0])
    rows = bert_padding.IndexFirstAxis.apply(x, indices)
    put = bert_padding.IndexPutFirstAxis.apply(rows, indices, 15)
    assert torch.equal(rows, x[indices])
    assert torch.equal(put[indices], rows)
    put.sum().backward()
    assert x.grad.sum() == 4
    again, whole = bert_padding.IndexFirstAxisResidual.apply(x, indices)
    assert torch.equal(again, rows)
    assert whole is x


ROWS, INDICES = torch.randn(5, 2), torch.tensor([4, 0])
TAKE = {"input": ROWS, "indices": INDICES}
PUT = {"values": torch.ones(2, 3), "indices": torch.tensor([3, 1]), "first_axis_dim": 4}
UNPAD = {"hidden_states": hidden(4), "attention_mask": MASK}
LENGTHS = {"hidden_states": hidden(4), "attention_mask_in_length": MASK}
PAD = {"hidden_states": torch.ones(2, 3), "indices": torch.tensor([3, 1]), "batch": 2, "seqlen": 3}
EINOPS = 'Error while processing rearrange-reduction pattern "b s ... -> (b s) ..."'
MISMATCH = "shape mismatch: value tensor of shape [3, 3] cannot be broadcast to indexing result of shape [2, 3]"
OUTSIDE = "is out of bounds for dimension 0 with size"
WRONG = [  # function, a right call, what differs from it, words, flash-attn's class
    ("index_first_axis", TAKE, {"input": ROWS[:, 0]}, "two axes", AssertionError),
    ("index_first_axis", TAKE, {"indices": INDICES + 1}, f"index 5 {OUTSIDE} 5", RuntimeError),
    ("index_first_axis", TAKE, {"indices": INDICES - 1}, f"index -1 {OUTSIDE} 5", RuntimeError),
    ("index_first_axis", TAKE, {"indices": INDICES[None]}, "indices must have shape", RuntimeError),
    ("index_first_axis_residual", TAKE, {"input": ROWS[:, 0]}, "two axes", AssertionError),
    ("index_first_axis_residual", TAKE, {"indices": INDICES + 1}, f"index 5 {OUTSIDE} 5", IndexError),
    ("index_put_first_axis", PUT, {"indices": torch.tensor([[3, 1]])}, "indices must have one axis", AssertionError),
    ("index_put_first_axis", PUT, {"values": torch.ones(2)}, "values two or more", AssertionError),
    ("index_put_first_axis", PUT, {"indices": torch.tensor([4, 1])}, f"index 4 {OUTSIDE} 4", IndexError),
    ("index_put_first_axis", PUT, {"values": torch.ones(3, 3)}, MISMATCH, RuntimeError),
    ("unpad_input", UNPAD, {"hidden_states": torch.ones(15)}, EINOPS, RuntimeError),
    ("unpad_input", UNPAD, {"hidden_states": torch.ones(3, 5)}, "two axes", AssertionError),
    ("unpad_input", UNPAD, {"attention_mask": torch.ones(3, 6)}, f"index 15 {OUTSIDE} 15", RuntimeError),
    ("unpad_input_for_concatenated_sequences", LENGTHS, {"hidden_states": torch.ones(15)}, EINOPS, RuntimeError),
    ("unpad_input_for_concatenated_sequences", LENGTHS, {"hidden_states": hidden()}, "two axes", AssertionError),
    ("pad_input", PAD, {"indices": torch.tensor([6, 1])}, f"index 6 {OUTSIDE} 6", IndexError),
    ("pad_input", PAD, {"hidden_states": torch.ones(3, 3)}, MISMATCH, RuntimeError),
    ("pad_input", PAD, {"hidden_states": torch.ones(2)}, "values two or more", AssertionError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "changed", "words", "kind"), WRONG)
def test_wrong_arguments(name, arguments, changed, words, kind):
    function = getattr(bert_padding, name)
    function(**arguments)
    expect_refusal(function, arguments | changed, words, kind)


def test_masks_that_do_not_fit():
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        bert_padding.unpad_input(hidden(4), MASK, MASK[:, 1:])


def test_one_value_for_all_rows_and_rows_from_the_end():
    """As flash-attn's indexing has it."""
    put = bert_padding.index_put_first_axis(torch.ones(1, 3), torch.tensor([3, -3]), 4)
    assert put.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert torch.equal(bert_padding.index_first_axis_residual(ROWS, torch.tensor([-1]))[0], ROWS[4:])
