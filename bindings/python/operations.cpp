// Arguments by position, in the order of the package's functions; None stands for an optional argument left out.
#include "bindings/python/operations.h"

#include <algorithm>
#include <string>

#include <flashport/decode.h>

#include "bindings/python/call.h"
#include "bindings/python/direct_calls.h"
#include "common/host/kv/cache_layout.h"

namespace flashport::python {
namespace {

std::int64_t last_extent(const TensorView& view) { return view.rank > 0 ? view.shape[view.rank - 1] : 0; }

// What the decode functions have in common: everything but the outputs.
enum DecodeArgument {
  kQ,
  kKCache,
  kVCache,
  kSeqlens,
  kBlockTable,
  kTokenTable,
  kRequestIndex,
  kKvIndptr,
  kKvIndices,
  kKvLastPageLen,
  kKvLayout,
  kCuSeqlensQ,
  kMaxQLen,
  kSoftmaxScale,
  kWindow,
  kSoftcap,
  kAlibiSlopes,
  kSinks,
  kTreeMask,
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
  kDecodeArguments
};

void read_decode(Call& call, Arguments a, DecodeArgs& args) {
  call.input("q", a[kQ], args.q);
  call.input("k_cache", a[kKCache], args.k_cache);
  call.input("v_cache", a[kVCache], args.v_cache);
  if (a[kSeqlens] != Py_None) {
    call.input("seqlens", a[kSeqlens], args.seqlens);
  } else if (a[kKvLastPageLen] == Py_None) {
    call.fail_type("seqlens", "may be None only with kv_indptr, kv_indices and kv_last_page_len");
  } else {
    args.seqlens.dtype = DType::kInt32;
    args.seqlens.device = args.q.device;
  }
  call.optional_input("block_table", a[kBlockTable], args.block_table);
  call.optional_input("token_table", a[kTokenTable], args.token_table);
  call.optional_input("request_index", a[kRequestIndex], args.request_index);
  call.optional_input("kv_indptr", a[kKvIndptr], args.kv_indptr);
  call.optional_input("kv_indices", a[kKvIndices], args.kv_indices);
  call.optional_input("kv_last_page_len", a[kKvLastPageLen], args.kv_last_page_len);
  args.kv_layout = call.kv_layout(a[kKvLayout]);
  call.optional_input("cu_seqlens_q", a[kCuSeqlensQ], args.cu_seqlens_q);
  if (a[kMaxQLen] != Py_None) args.max_q_len = call.integer("max_q_len", a[kMaxQLen]);
  args.softmax_scale = call.optional_number("softmax_scale", a[kSoftmaxScale]);
  const Window window = call.window(a[kWindow]);
  args.window_left = window.left;
  args.window_right = window.right;
  args.softcap = call.number("softcap", a[kSoftcap]);
  call.optional_input("alibi_slopes", a[kAlibiSlopes], args.alibi_slopes);
  call.optional_input("sinks", a[kSinks], args.sinks);
  call.optional_input("tree_mask", a[kTreeMask], args.tree_mask);
  call.optional_input("k_scale", a[kKScale], args.k_scale);
  call.optional_input("v_scale", a[kVScale], args.v_scale);
  args.k_format = call.optional_format("k_format", a[kKFormat]);
  args.v_format = call.optional_format("v_format", a[kVFormat]);
  args.num_splits = call.num_splits(a[kNumSplits]);
  call.optional_output("workspace", a[kWorkspace], args.workspace);
}

// Shape of `out` where q and v_cache have shapes to take it from; else the library's own checks speak about those.
bool decode_out_shape(const DecodeArgs& args, std::int64_t* shape) {
  if (args.q.rank < 3 || args.q.rank > 4 || args.v_cache.rank < 3) return false;
  for (int axis = 0; axis < args.q.rank; ++axis) shape[axis] = args.q.shape[axis];
  const KvFormat own = own_format(args.v_cache.dtype).value_or(KvFormat::kFp32);  // uint8 has none: it is refused
  const std::int64_t head_dim_v = stored_head_dim(args.v_format.value_or(own), last_extent(args.v_cache));
  shape[args.q.rank - 1] = head_dim_v;
  // A broadcast or absurd shape is refused by the library's checks, not by an allocation.
  constexpr std::int64_t kMostHeadDim = 4096;
  return head_dim_v <= kMostHeadDim && last_extent(args.q) <= kMostHeadDim;
}

py::object py_flash_decode(Arguments a) {
  Call call("flash_decode", a[kStream]);
  DecodeArgs args;
  read_decode(call, a, args);
  const bool returns_lse = call.boolean("return_lse", a[kReturnLse]) || a[kLse] != Py_None;

  Allocation out;
  Allocation lse;
  std::int64_t shape[kMaxRank] = {};
  const bool shaped = decode_out_shape(args, shape);
  if (a[kOut] != Py_None) {
    call.output("out", a[kOut], args.out);
    out.object = py::reinterpret_borrow<py::object>(a[kOut]);
  } else if (shaped) {
    out = call.allocate(a[kQ], args.q, args.q.dtype, shape, args.q.rank);
    args.out = out.view;
  }
  if (a[kLse] != Py_None) {
    call.output("lse", a[kLse], args.lse.emplace());
    lse.object = py::reinterpret_borrow<py::object>(a[kLse]);
  } else if (returns_lse && shaped) {
    lse = call.allocate(a[kQ], args.q, DType::kFloat32, shape, args.q.rank - 1);
    args.lse = lse.view;
  }

  call.run([&](Stream stream) { flash_decode(args, stream); });
  py::object result = a[kOut] != Py_None ? std::move(out.object) : call.finish(a[kQ], out);
  if (!returns_lse) return result;
  return py::make_tuple(std::move(result), a[kLse] != Py_None ? std::move(lse.object) : call.finish(a[kQ], lse));
}

py::object py_decode_workspace_size(Arguments a) {
  Call call("decode_workspace_size", a[kStream], TorchRole::kQuestion);
  DecodeArgs args;
  read_decode(call, a, args);
  if (a[kOut] != Py_None) call.output("out", a[kOut], args.out);
  call.optional_output("lse", a[kLse], args.lse);
  (void)call.boolean("return_lse", a[kReturnLse]);
  std::int64_t bytes = 0;
  call.run([&](Stream) { bytes = decode_workspace_size(args); });
  return py::int_(bytes);
}

py::object py_flash_decode_stage1(Arguments a) {
  Call call("flash_decode_stage1", a[15], TorchRole::kNoGradOperator);
  DecodeStage1Args args;
  call.input("q", a[0], args.q);
  call.input("k", a[1], args.k);
  call.input("v", a[2], args.v);
  call.input("Req_to_tokens", a[3], args.req_to_tokens);
  call.input("B_req_idx", a[4], args.b_req_idx);
  call.input("B_Seqlen", a[5], args.b_seqlen);
  args.max_len_in_batch = call.integer("max_len_in_batch", a[6]);
  call.output("mid_out", a[7], args.mid_out);
  call.output("mid_out_logsumexp", a[8], args.mid_out_logsumexp);
  args.block_seq = call.integer("block_seq", a[9]);
  args.softmax_scale = call.optional_number("sm_scale", a[10]);
  call.optional_input("k_scale", a[11], args.k_scale);
  call.optional_input("v_scale", a[12], args.v_scale);
  args.k_format = call.optional_format("k_format", a[13]);
  args.v_format = call.optional_format("v_format", a[14]);
  call.run([&](Stream stream) { flash_decode_stage1(args, stream); });
  return py::none();
}

py::object py_flash_decode_stage2(Arguments a) {
  Call call("flash_decode_stage2", a[6], TorchRole::kNoGradOperator);
  DecodeStage2Args args;
  call.input("mid_out", a[0], args.mid_out);
  call.input("mid_out_logexpsum", a[1], args.mid_out_logexpsum);
  call.input("B_Seqlen", a[2], args.b_seqlen);
  call.output("Out", a[3], args.out);
  args.block_seq = call.integer("block_seq", a[4]);
  call.optional_output("lse", a[5], args.lse);
  call.run([&](Stream stream) { flash_decode_stage2(args, stream); });
  return py::none();
}

py::object py_append_kv(Arguments a) {
  Call call("append_kv", a[10]);
  AppendKvArgs args;
  call.input("k", a[0], args.k);
  call.input("v", a[1], args.v);
  call.output("k_cache", a[2], args.k_cache);
  call.output("v_cache", a[3], args.v_cache);
  call.input("positions", a[4], args.positions);
  args.kv_layout = call.kv_layout(a[5]);
  call.optional_scale("k_scale", a[6], args.k_scale);
  call.optional_scale("v_scale", a[7], args.v_scale);
  args.k_format = call.optional_format("k_format", a[8]);
  args.v_format = call.optional_format("v_format", a[9]);
  call.run([&](Stream stream) { append_kv(args, stream); });
  return py::none();
}

// The result of a conversion: `out` as given, or a new array with the extents of `x` but the last.
Allocation converted_rows(Call& call, PyObject* like, const TensorView& x, DType dtype, std::int64_t last,
                          PyObject* out) {
  Allocation result;
  if (out != Py_None) {
    result.object = py::reinterpret_borrow<py::object>(out);
    call.output("out", out, result.view);
  } else if (x.rank >= 1) {
    std::int64_t shape[kMaxRank] = {};
    std::copy(x.shape, x.shape + x.rank, shape);
    shape[x.rank - 1] = last;
    result = call.allocate(like, x, dtype, shape, x.rank);
  }
  return result;
}

py::object py_quantize_kv(Arguments a) {
  Call call("quantize_kv", a[4]);
  QuantizeKvArgs args;
  call.input("x", a[0], args.x);
  args.format = format_argument("quantize_kv", "format", a[1]);
  Allocation out = converted_rows(call, a[0], args.x, kv_format_trait(args.format).dtype,
                                  stored_extent(args.format, last_extent(args.x)), a[2]);
  args.out = out.view;
  call.optional_output("scale", a[3], args.scale);
  call.run([&](Stream stream) { quantize_kv(args, stream); });
  return a[2] != Py_None ? std::move(out.object) : call.finish(a[0], out);
}

py::object py_dequantize_kv(Arguments a) {
  Call call("dequantize_kv", a[5]);
  DequantizeKvArgs args;
  call.input("x", a[0], args.x);
  args.format = format_argument("dequantize_kv", "format", a[1]);
  DType dtype = DType::kFloat32;
  if (a[2] != Py_None) {
    dtype = dtype_argument("dequantize_kv", "dtype", a[2]);
    if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBFloat16) {
      call.fail_value("dtype", std::string("must be float32, float16 or bfloat16, got \"") + dtype_name(dtype) + "\"");
    }
    if (a[3] != Py_None) call.fail_value("dtype", "must be None where out is given, which has its own");
  }
  Allocation out = converted_rows(call, a[0], args.x, dtype, stored_head_dim(args.format, last_extent(args.x)), a[3]);
  args.out = out.view;
  call.optional_input("scale", a[4], args.scale);
  call.run([&](Stream stream) { dequantize_kv(args, stream); });
  return a[3] != Py_None ? std::move(out.object) : call.finish(a[0], out);
}

bool is_base_2(const Call& call, PyObject* object) {
  if (object == Py_None) return false;
  const double base = call.number("lse_base", object);
  if (base != 2.0)
    call.fail_value("lse_base", "must be None (natural logarithm) or 2, got " + std::string(py::str(object)));
  return true;
}

// Outputs of a merge: `out` and `out_lse` as given, or new ones of these shapes.
struct MergeOutputs {
  Allocation out, lse;
};
MergeOutputs merge_outputs(Call& call, PyObject* like, const TensorView& o, const TensorView& lse,
                           const std::int64_t* shape, int rank, PyObject* out, PyObject* out_lse) {
  MergeOutputs result;
  if (out != Py_None) {
    result.out.object = py::reinterpret_borrow<py::object>(out);
    call.output("out", out, result.out.view);
  } else if (rank >= 1) {
    result.out = call.allocate(like, o, o.dtype, shape, rank);
  }
  if (out_lse != Py_None) {
    result.lse.object = py::reinterpret_borrow<py::object>(out_lse);
    call.output("out_lse", out_lse, result.lse.view);
  } else if (rank >= 1) {
    result.lse = call.allocate(like, o, lse.dtype, shape, rank - 1);
  }
  return result;
}

py::object finish_merge(Call& call, PyObject* like, MergeOutputs& outputs, PyObject* out, PyObject* out_lse) {
  py::object o = out != Py_None ? std::move(outputs.out.object) : call.finish(like, outputs.out);
  py::object lse = out_lse != Py_None ? std::move(outputs.lse.object) : call.finish(like, outputs.lse);
  return py::make_tuple(std::move(o), std::move(lse));
}

py::object py_merge_state(Arguments a) {
  Call call("merge_state", a[7]);
  MergeStateArgs args;
  call.input("o_a", a[0], args.o_a);
  call.input("lse_a", a[1], args.lse_a);
  call.input("o_b", a[2], args.o_b);
  call.input("lse_b", a[3], args.lse_b);
  args.lse_base_2 = is_base_2(call, a[4]);
  MergeOutputs outputs = merge_outputs(call, a[0], args.o_a, args.lse_a, args.o_a.shape, args.o_a.rank, a[5], a[6]);
  args.out = outputs.out.view;
  args.out_lse = outputs.lse.view;
  call.run([&](Stream stream) { merge_state(args, stream); });
  return finish_merge(call, a[0], outputs, a[5], a[6]);
}

py::object py_merge_states(Arguments a) {
  Call call("merge_states", a[5]);
  MergeStatesArgs args;
  call.input("o", a[0], args.o);
  call.input("lse", a[1], args.lse);
  args.lse_base_2 = is_base_2(call, a[2]);
  MergeOutputs outputs = merge_outputs(call, a[0], args.o, args.lse, args.o.shape + 1, args.o.rank - 1, a[3], a[4]);
  args.out = outputs.out.view;
  args.out_lse = outputs.lse.view;
  call.run([&](Stream stream) { merge_states(args, stream); });
  return finish_merge(call, a[0], outputs, a[3], a[4]);
}

constexpr Operation kFlashDecode{"flash_decode", py_flash_decode, kDecodeArguments};
constexpr Operation kDecodeWorkspaceSize{"decode_workspace_size", py_decode_workspace_size, kDecodeArguments};
constexpr Operation kFlashDecodeStage1{"flash_decode_stage1", py_flash_decode_stage1, 16};
constexpr Operation kFlashDecodeStage2{"flash_decode_stage2", py_flash_decode_stage2, 7};
constexpr Operation kAppendKv{"append_kv", py_append_kv, 11};
constexpr Operation kQuantizeKv{"quantize_kv", py_quantize_kv, 5};
constexpr Operation kDequantizeKv{"dequantize_kv", py_dequantize_kv, 6};
constexpr Operation kMergeState{"merge_state", py_merge_state, 8};
constexpr Operation kMergeStates{"merge_states", py_merge_states, 6};

}  // namespace

void define_operations(py::module_& module) {
  add_operation<kFlashDecode>(module);
  add_operation<kDecodeWorkspaceSize>(module);
  add_operation<kFlashDecodeStage1>(module);
  add_operation<kFlashDecodeStage2>(module);
  add_operation<kAppendKv>(module);
  add_operation<kQuantizeKv>(module);
  add_operation<kDequantizeKv>(module);
  add_operation<kMergeState>(module);
  add_operation<kMergeStates>(module);
  define_gated_delta_operations(module);
  define_attention_operations(module);
  define_mixed_operations(module);
}

}  // namespace flashport::python
