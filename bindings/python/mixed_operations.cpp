// Decode over segments of keys: as a list of them, or as llama.cpp has it, a quantised part and a hot one after it.
// None stands for an argument left out.
#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <string_view>

#include <flashport/decode.h>

#include "bindings/python/call.h"
#include "bindings/python/direct_calls.h"
#include "bindings/python/operations.h"
#include "common/host/kv/cache_layout.h"

namespace flashport::python {
namespace {

// A segment's fields, in the order of KvSegment.
enum Field {
  kK,
  kV,
  kSeqlens,
  kKFormat,
  kVFormat,
  kBlockTable,
  kTokenTable,
  kRequestIndex,
  kKvIndptr,
  kKvIndices,
  kKvLayout,
  kKScale,
  kVScale,
  kFields
};
constexpr std::array<const char*, kFields> kFieldNames = {
    "k",         "v",          "seqlens",   "k_format", "v_format", "block_table", "token_table", "request_index",
    "kv_indptr", "kv_indices", "kv_layout", "k_scale",  "v_scale"};

// What messages call each field of a segment.
using FieldNames = std::array<std::string, kFields>;
FieldNames numbered_names(int number) {
  FieldNames names;
  for (std::size_t i = 0; i < kFields; ++i) {
    names[i] = "segments[" + std::to_string(number) + "]: " + kFieldNames[i];
  }
  return names;
}
const std::array<FieldNames, kMostDecodeSegments>& numbered_names() {
  static const auto* all = new std::array<FieldNames, kMostDecodeSegments>{numbered_names(0), numbered_names(1),
                                                                           numbered_names(2), numbered_names(3)};
  return *all;
}

void read_segment(Call& call, Arguments a, const FieldNames& names, DecodeSegment& to) {
  const auto name = [&](Field field) { return names[field].c_str(); };
  call.input(name(kK), a[kK], to.k);
  call.input(name(kV), a[kV], to.v);
  if (a[kSeqlens] != Py_None) call.input(name(kSeqlens), a[kSeqlens], to.seqlens);
  to.k_format = call.optional_format(name(kKFormat), a[kKFormat]);
  to.v_format = call.optional_format(name(kVFormat), a[kVFormat]);
  call.optional_input(name(kBlockTable), a[kBlockTable], to.block_table);
  call.optional_input(name(kTokenTable), a[kTokenTable], to.token_table);
  call.optional_input(name(kRequestIndex), a[kRequestIndex], to.request_index);
  call.optional_input(name(kKvIndptr), a[kKvIndptr], to.kv_indptr);
  call.optional_input(name(kKvIndices), a[kKvIndices], to.kv_indices);
  to.kv_layout = call.is_second(name(kKvLayout), a[kKvLayout], "NHD", "HND") ? KvLayout::kHND : KvLayout::kNHD;
  call.optional_input(name(kKScale), a[kKScale], to.k_scale);
  call.optional_input(name(kVScale), a[kVScale], to.v_scale);
}

// The library's error as the caller's function and arguments have it: `function` in place of its own, and where names
// of segments are given those in place of "segments[i]: k".
template <class Error>
[[noreturn]] void throw_reworded(const Error& error, const char* function, const FieldNames* names, int count) {
  constexpr std::string_view kSegment = "segments[";
  std::string text = error.what();
  text = function + text.substr(std::min(text.find(": "), text.size()));
  for (std::size_t at = text.find(kSegment); names != nullptr && at != std::string::npos;
       at = text.find(kSegment, at + 1)) {
    const int number = text[at + kSegment.size()] - '0';
    const std::size_t field = at + kSegment.size() + 4;  // after "0]: "
    if (number < 0 || number >= count || field >= text.size()) continue;
    std::size_t end = field;
    while (end < text.size() && (std::islower(static_cast<unsigned char>(text[end])) != 0 || text[end] == '_')) ++end;
    const std::string_view word = std::string_view(text).substr(field, end - field);
    const auto known = std::find(kFieldNames.begin(), kFieldNames.end(), word);
    if (known == kFieldNames.end()) {  // of no argument alone
      text.erase(at, field - at);
    } else {
      text.replace(at, end - at, names[number][static_cast<std::size_t>(known - kFieldNames.begin())]);
    }
  }
  throw Error(text);
}

template <class Function>
void reworded(const char* function, const FieldNames* names, int count, const Function& run) {
  try {
    run();
  } catch (const ValueError& error) {
    throw_reworded(error, function, names, count);
  } catch (const TypeError& error) {
    throw_reworded(error, function, names, count);
  } catch (const NotSupportedError& error) {
    throw_reworded(error, function, names, count);
  }
}

// What both functions have besides segments, in this order at the end of their arguments.
enum Common {
  kMaskSlopes,
  kCuSeqlensQ,
  kMaxQLen,
  kSoftmaxScale,
  kWindow,
  kSoftcap,
  kAlibiSlopes,
  kSinks,
  kBySegment,
  kOut,
  kLse,
  kReturnLse,
  kWorkspace,
  kStream,
  kCommon
};

void read_common(Call& call, PyObject* mask, Arguments a, MixedDecodeArgs& args) {
  call.optional_input("mask", mask, args.mask);
  call.optional_input("mask_slopes", a[kMaskSlopes], args.mask_slopes);
  call.optional_input("cu_seqlens_q", a[kCuSeqlensQ], args.cu_seqlens_q);
  if (a[kMaxQLen] != Py_None) args.max_q_len = call.integer("max_q_len", a[kMaxQLen]);
  args.softmax_scale = call.optional_number("softmax_scale", a[kSoftmaxScale]);
  const Window window = call.window(a[kWindow]);
  args.window_left = window.left;
  args.window_right = window.right;
  args.softcap = call.number("softcap", a[kSoftcap]);
  call.optional_input("alibi_slopes", a[kAlibiSlopes], args.alibi_slopes);
  call.optional_input("sinks", a[kSinks], args.sinks);
  args.by_segment = call.boolean("by_segment", a[kBySegment]);
  call.optional_output("workspace", a[kWorkspace], args.workspace);
}

// Shape of `out` where q and the first segment have shapes to take it from; else the library's own checks speak.
bool out_shape(const MixedDecodeArgs& args, std::int64_t* shape) {
  if (args.segments.empty()) return false;
  const TensorView &q = args.q, &v = args.segments[0].v;
  if (q.rank < 3 || q.rank > 4 || v.rank < 3) return false;
  for (int axis = 0; axis < q.rank; ++axis) shape[axis] = q.shape[axis];
  const KvFormat own = own_format(v.dtype).value_or(KvFormat::kFp32);  // uint8 has none: it is refused
  const std::int64_t head_dim_v = stored_head_dim(args.segments[0].v_format.value_or(own), v.shape[v.rank - 1]);
  shape[q.rank - 1] = head_dim_v;
  constexpr std::int64_t kMostHeadDim = 4096;  // a broadcast axis may have any extent
  return head_dim_v <= kMostHeadDim && q.shape[q.rank - 1] <= kMostHeadDim;
}

py::object attend(Call& call, const char* function, PyObject* q, MixedDecodeArgs& args, const FieldNames* names,
                  Arguments a) {
  const bool returns_lse = call.boolean("return_lse", a[kReturnLse]) || a[kLse] != Py_None;
  Allocation out;
  Allocation lse;
  std::int64_t shape[kMaxRank] = {};
  const bool shaped = out_shape(args, shape);
  if (a[kOut] != Py_None) {
    call.output("out", a[kOut], args.out);
    out.object = py::reinterpret_borrow<py::object>(a[kOut]);
  } else if (shaped) {
    out = call.allocate(q, args.q, args.q.dtype, shape, args.q.rank);
    args.out = out.view;
  }
  if (a[kLse] != Py_None) {
    call.output("lse", a[kLse], args.lse.emplace());
    lse.object = py::reinterpret_borrow<py::object>(a[kLse]);
  } else if (returns_lse && shaped) {
    lse = call.allocate(q, args.q, DType::kFloat32, shape, args.q.rank - 1);
    args.lse = lse.view;
  }
  reworded(function, names, static_cast<int>(args.segments.size()),
           [&] { call.run([&](Stream stream) { flash_decode_mixed(args, stream); }); });
  py::object result = a[kOut] != Py_None ? std::move(out.object) : call.finish(q, out);
  if (!returns_lse) return result;
  return py::make_tuple(std::move(result), a[kLse] != Py_None ? std::move(lse.object) : call.finish(q, lse));
}

constexpr char kSegmentsFunction[] = "flash_decode_segments";

// (q, segments, mask, common)
void read_segments(Call& call, const char* function, Arguments a, MixedDecodeArgs& args) {
  call.input("q", a[0], args.q);
  if (!PyList_Check(a[1]) && !PyTuple_Check(a[1])) {
    fail_type(function, "segments", std::string("must be a list of KvSegment, got ") + Py_TYPE(a[1])->tp_name);
  }
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(a[1]);
  if (count < 1 || count > kMostDecodeSegments) {
    fail_value(function, "segments",
               "must be 1 to " + std::to_string(kMostDecodeSegments) + ", got " + std::to_string(count));
  }
  args.segments.resize(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* segment = PySequence_Fast_GET_ITEM(a[1], i);
    if (!PyTuple_Check(segment) || PyTuple_GET_SIZE(segment) != kFields) {
      fail_type(
          function, "segments",
          "must be a list of KvSegment, got " + std::string(Py_TYPE(segment)->tp_name) + " at " + std::to_string(i));
    }
    const auto place = static_cast<std::size_t>(i);
    read_segment(call, &PyTuple_GET_ITEM(segment, 0), numbered_names()[place], args.segments[place]);
  }
  read_common(call, a[2], a + 3, args);
}

py::object py_flash_decode_segments(Arguments a) {
  Call call(kSegmentsFunction, a[3 + kStream]);
  MixedDecodeArgs args;
  read_segments(call, kSegmentsFunction, a, args);
  return attend(call, kSegmentsFunction, a[0], args, nullptr, a + 3);
}

py::object py_mixed_workspace_size(Arguments a) {
  constexpr char kFunction[] = "mixed_workspace_size";
  Call call(kFunction, a[3 + kStream], TorchRole::kQuestion);
  MixedDecodeArgs args;
  read_segments(call, kFunction, a, args);
  if (a[3 + kOut] != Py_None) call.output("out", a[3 + kOut], args.out);
  call.optional_output("lse", a[3 + kLse], args.lse);
  (void)call.boolean("return_lse", a[3 + kReturnLse]);
  std::int64_t bytes = 0;
  reworded(kFunction, nullptr, 0, [&] { call.run([&](Stream) { bytes = mixed_workspace_size(args); }); });
  return py::int_(bytes);
}

// (q, k_hot, v_hot, mask, k_quant, v_quant, hot_seqlens, quant_seqlens, k_quant_format, v_quant_format, k_quant_scale,
// v_quant_scale, kv_layout, common)
enum Mixed {
  kQ,
  kKHot,
  kVHot,
  kMask,
  kKQuant,
  kVQuant,
  kHotSeqlens,
  kQuantSeqlens,
  kKQuantFormat,
  kVQuantFormat,
  kKQuantScale,
  kVQuantScale,
  kLayout,
  kMixedCommon
};
const std::array<FieldNames, 2>& part_names() {
  static const auto* all = new std::array<FieldNames, 2>{
      FieldNames{"k_quant", "v_quant", "quant_seqlens", "k_quant_format", "v_quant_format", "block_table",
                 "token_table", "request_index", "kv_indptr", "kv_indices", "kv_layout", "k_quant_scale",
                 "v_quant_scale"},
      FieldNames{"k_hot", "v_hot", "hot_seqlens", "k_hot_format", "v_hot_format", "block_table", "token_table",
                 "request_index", "kv_indptr", "kv_indices", "kv_layout", "k_hot_scale", "v_hot_scale"}};
  return *all;
}

py::object py_flash_decode_mixed(Arguments a) {
  constexpr char kFunction[] = "flash_decode_mixed";
  Arguments common = a + kMixedCommon;
  Call call(kFunction, common[kStream]);
  MixedDecodeArgs args;
  call.input("q", a[kQ], args.q);
  const auto read_part = [&](const FieldNames& names, Mixed k, Mixed v, Mixed seqlens, PyObject* k_format,
                             PyObject* v_format, PyObject* k_scale, PyObject* v_scale) {
    std::array<PyObject*, kFields> fields;
    fields.fill(Py_None);
    fields[Field::kK] = a[k];
    fields[Field::kV] = a[v];
    fields[Field::kSeqlens] = a[seqlens];
    fields[Field::kKFormat] = k_format;
    fields[Field::kVFormat] = v_format;
    fields[Field::kKvLayout] = a[kLayout];
    fields[Field::kKScale] = k_scale;
    fields[Field::kVScale] = v_scale;
    read_segment(call, fields.data(), names, args.segments.emplace_back());
  };
  const bool has_quantised = a[kKQuant] != Py_None;
  if (has_quantised != (a[kVQuant] != Py_None)) {
    call.fail_type(has_quantised ? "v_quant" : "k_quant", "must be given with the other one, got None");
  }
  const FieldNames* names = part_names().data();
  if (has_quantised) {
    read_part(names[0], kKQuant, kVQuant, kQuantSeqlens, a[kKQuantFormat], a[kVQuantFormat], a[kKQuantScale],
              a[kVQuantScale]);
  } else {
    ++names;
  }
  read_part(part_names()[1], kKHot, kVHot, kHotSeqlens, Py_None, Py_None, Py_None, Py_None);
  read_common(call, a[kMask], common, args);
  return attend(call, kFunction, a[kQ], args, names, common);
}

constexpr Operation kFlashDecodeSegments{"flash_decode_segments", py_flash_decode_segments, 3 + kCommon};
constexpr Operation kMixedWorkspaceSize{"mixed_workspace_size", py_mixed_workspace_size, 3 + kCommon};
constexpr Operation kFlashDecodeMixed{"flash_decode_mixed", py_flash_decode_mixed, int{kMixedCommon} + int{kCommon}};

}  // namespace

void define_mixed_operations(py::module_& module) {
  add_operation<kFlashDecodeSegments>(module);
  add_operation<kMixedWorkspaceSize>(module);
  add_operation<kFlashDecodeMixed>(module);
}

}  // namespace flashport::python
