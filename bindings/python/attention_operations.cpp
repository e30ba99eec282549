// Attention of many query tokens. None stands for an argument left out.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <flashport/attention.h>

#include "bindings/python/call.h"
#include "bindings/python/direct_calls.h"
#include "bindings/python/operations.h"
#include "common/host/kv/cache_layout.h"

namespace flashport::python {
namespace {

enum Argument {
  kQ,
  kK,
  kV,
  kCuSeqlensQ,
  kCuSeqlensK,
  kMaxSeqlenQ,
  kMaxSeqlenK,
  kSequsedQ,
  kSequsedK,
  kLeftpadK,
  kBlockTable,
  kTokenTable,
  kRequestIndex,
  kKvIndptr,
  kKvIndices,
  kKvLastPageLen,
  kKvLayout,
  kKNew,
  kVNew,
  kCuSeqlensKNew,
  kRotaryCos,
  kRotarySin,
  kRotaryInterleaved,
  kSoftmaxScale,
  kCausal,
  kWindow,
  kSoftcap,
  kAlibiSlopes,
  kSinks,
  kBias,
  kDropoutP,
  kRngState,
  kQScale,
  kKScale,
  kVScale,
  kKFormat,
  kVFormat,
  kNumSplits,
  kOut,
  kLse,
  kReturnLse,
  kWorkspace,
  kStream,
  kArguments
};

// All but the outputs.
void read_attention(Call& call, Arguments a, AttentionArgs& args) {
  call.input("q", a[kQ], args.q);
  if (a[kKNew] == Py_None) {
    call.input("k", a[kK], args.k);
    call.input("v", a[kV], args.v);
  } else {
    call.output("k", a[kK], args.k);
    call.output("v", a[kV], args.v);
  }
  call.optional_input("cu_seqlens_q", a[kCuSeqlensQ], args.cu_seqlens_q);
  call.optional_input("cu_seqlens_k", a[kCuSeqlensK], args.cu_seqlens_k);
  if (a[kMaxSeqlenQ] != Py_None) args.max_seqlen_q = call.integer("max_seqlen_q", a[kMaxSeqlenQ]);
  if (a[kMaxSeqlenK] != Py_None) args.max_seqlen_k = call.integer("max_seqlen_k", a[kMaxSeqlenK]);
  call.optional_input("seqused_q", a[kSequsedQ], args.seqused_q);
  call.optional_input("seqused_k", a[kSequsedK], args.seqused_k);
  call.optional_input("leftpad_k", a[kLeftpadK], args.leftpad_k);
  call.optional_input("block_table", a[kBlockTable], args.block_table);
  call.optional_input("token_table", a[kTokenTable], args.token_table);
  call.optional_input("request_index", a[kRequestIndex], args.request_index);
  call.optional_input("kv_indptr", a[kKvIndptr], args.kv_indptr);
  call.optional_input("kv_indices", a[kKvIndices], args.kv_indices);
  call.optional_input("kv_last_page_len", a[kKvLastPageLen], args.kv_last_page_len);
  args.kv_layout = call.kv_layout(a[kKvLayout]);
  call.optional_input("k_new", a[kKNew], args.k_new);
  call.optional_input("v_new", a[kVNew], args.v_new);
  call.optional_input("cu_seqlens_k_new", a[kCuSeqlensKNew], args.cu_seqlens_k_new);
  call.optional_input("rotary_cos", a[kRotaryCos], args.rotary_cos);
  call.optional_input("rotary_sin", a[kRotarySin], args.rotary_sin);
  args.rotary_interleaved = call.boolean("rotary_interleaved", a[kRotaryInterleaved]);
  args.softmax_scale = call.optional_number("softmax_scale", a[kSoftmaxScale]);
  args.causal = call.boolean("causal", a[kCausal]);
  const Window window = call.window(a[kWindow]);
  args.window_left = window.left;
  args.window_right = window.right;
  args.softcap = call.number("softcap", a[kSoftcap]);
  call.optional_input("alibi_slopes", a[kAlibiSlopes], args.alibi_slopes);
  call.optional_input("sinks", a[kSinks], args.sinks);
  call.optional_input("bias", a[kBias], args.bias);
  args.dropout_p = call.number("dropout_p", a[kDropoutP]);
  call.optional_input("rng_state", a[kRngState], args.rng_state);
  call.optional_input("q_scale", a[kQScale], args.q_scale);
  call.optional_input("k_scale", a[kKScale], args.k_scale);
  call.optional_input("v_scale", a[kVScale], args.v_scale);
  args.k_format = call.optional_format("k_format", a[kKFormat]);
  args.v_format = call.optional_format("v_format", a[kVFormat]);
  args.num_splits = call.num_splits(a[kNumSplits]);
  call.optional_output("workspace", a[kWorkspace], args.workspace);
}

// Shapes of the outputs, where q and v have axes to take them from and are no larger than memory may be asked for: of
// all others the library's own checks speak.
struct Shapes {
  std::int64_t out[4], lse[3];
};
bool output_shapes(const AttentionArgs& args, Shapes& shapes) {
  const TensorView &q = args.q, &v = args.v;
  const bool packed = args.cu_seqlens_q.has_value();
  if (q.rank != (packed ? 3 : 4) || v.rank < 3) return false;
  const int dim = q.rank - 1;
  constexpr std::int64_t kMostHeadDim = 4096;  // a broadcast axis may have any extent
  if (q.shape[dim] > kMostHeadDim || v.shape[v.rank - 1] > kMostHeadDim) return false;
  const KvFormat own = own_format(v.dtype).value_or(KvFormat::kFp32);  // uint8 has none: it is refused
  std::copy(q.shape, q.shape + dim, shapes.out);
  shapes.out[dim] = stored_head_dim(args.v_format.value_or(own), v.shape[v.rank - 1]);
  const std::int64_t heads = q.shape[dim - 1], tokens = q.shape[dim - 2];
  if (packed) {
    shapes.lse[0] = heads;
    shapes.lse[1] = tokens;
  } else {
    shapes.lse[0] = q.shape[0];
    shapes.lse[1] = heads;
    shapes.lse[2] = tokens;
  }
  return true;
}

py::object py_attention(Arguments a) {
  Call call("attention", a[kStream]);
  AttentionArgs args;
  read_attention(call, a, args);
  const bool returns_lse = call.boolean("return_lse", a[kReturnLse]) || a[kLse] != Py_None;

  Allocation out;
  Allocation lse;
  Shapes shapes{};
  const bool shaped = output_shapes(args, shapes);
  if (a[kOut] != Py_None) {
    call.output("out", a[kOut], args.out);
    out.object = py::reinterpret_borrow<py::object>(a[kOut]);
  } else if (shaped) {
    const DType dtype = args.q.dtype == DType::kFp8E4M3 ? DType::kBFloat16 : args.q.dtype;
    out = call.allocate(a[kQ], args.q, dtype, shapes.out, args.q.rank);
    args.out = out.view;
  } else {
    (void)attention_workspace_size(args);  // refuses what no output can be made for
  }
  if (a[kLse] != Py_None) {
    call.output("lse", a[kLse], args.lse.emplace());
    lse.object = py::reinterpret_borrow<py::object>(a[kLse]);
  } else if (returns_lse && shaped) {
    lse = call.allocate(a[kQ], args.q, DType::kFloat32, shapes.lse, args.q.rank - 1);
    args.lse = lse.view;
  }

  call.run([&](Stream stream) { attention(args, stream); });
  py::object result = a[kOut] != Py_None ? std::move(out.object) : call.finish(a[kQ], out);
  if (!returns_lse) return result;
  return py::make_tuple(std::move(result), a[kLse] != Py_None ? std::move(lse.object) : call.finish(a[kQ], lse));
}

py::object py_attention_workspace_size(Arguments a) {
  Call call("attention_workspace_size", a[kStream], TorchRole::kQuestion);
  AttentionArgs args;
  read_attention(call, a, args);
  if (a[kOut] != Py_None) call.output("out", a[kOut], args.out);
  call.optional_output("lse", a[kLse], args.lse);
  (void)call.boolean("return_lse", a[kReturnLse]);
  std::int64_t bytes = 0;
  call.run([&](Stream) { bytes = attention_workspace_size(args); });
  return py::int_(bytes);
}

// (shape, rng_state, dropout_p, mask, stream)
py::object py_dropout_mask(Arguments a) {
  Call call("dropout_mask", a[4]);
  DropoutMaskArgs args;
  const std::vector<std::int64_t> shape = shape_argument("dropout_mask", a[0]);
  call.input("rng_state", a[1], args.rng_state);
  args.dropout_p = call.number("dropout_p", a[2]);
  Allocation mask;
  if (a[3] != Py_None) {
    call.output("mask", a[3], args.mask);
    mask.object = py::reinterpret_borrow<py::object>(a[3]);
    const bool same = static_cast<std::size_t>(args.mask.rank) == shape.size() &&
                      std::equal(shape.begin(), shape.end(), args.mask.shape);
    if (!same) {
      call.fail_value("mask", "must have the shape " + std::string(py::str(a[0])) + " that is asked for, got " +
                                  std::string(py::str(py::handle(a[3]).attr("shape"))));
    }
  } else {
    if (shape.size() != 4) {
      call.fail_value("shape",
                      "must have 4 extents (batch, num_q_heads, q_len, kv_len), got " + std::string(py::str(a[0])));
    }
    mask = call.allocate(a[1], args.rng_state, DType::kUInt8, shape.data(), 4);
    args.mask = mask.view;
  }
  call.run([&](Stream stream) { dropout_mask(args, stream); });
  return a[3] != Py_None ? std::move(mask.object) : call.finish(a[1], mask);
}

constexpr Operation kAttention{"attention", py_attention, kArguments};
constexpr Operation kAttentionWorkspaceSize{"attention_workspace_size", py_attention_workspace_size, kArguments};
constexpr Operation kDropoutMask{"dropout_mask", py_dropout_mask, 5};

}  // namespace

void define_attention_operations(py::module_& module) {
  add_operation<kAttention>(module);
  add_operation<kAttentionWorkspaceSize>(module);
  add_operation<kDropoutMask>(module);
}

}  // namespace flashport::python
