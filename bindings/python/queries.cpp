// supports(), which_kernel() and explain(): a table of operations, each of which makes its C++ query of options by
// name.
#include "bindings/python/queries.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <flashport/attention.h>
#include <flashport/decode.h>
#include <flashport/error.h>
#include <flashport/gated_delta.h>

#include "bindings/python/arguments.h"
#include "common/host/kv/cache_layout.h"

namespace py = pybind11;

namespace flashport::python {
namespace {

// The options of one question. Each reader leaves a member as it is, the default, where the option was not given.
class Options {
 public:
  Options(const char* function, const char* operation, const py::dict& given)
      : function_(function), operation_(operation), given_(given) {}

  void target(std::string& to) {
    read("target", kNoneIsDefault, [&](py::handle x) { to = text_argument(function_, "target", x); });
  }
  void dtype(const char* name, DType& to) {
    read(name, kNoneIsWrong, [&](py::handle x) { to = dtype_argument(function_, name, x); });
  }
  void integer(const char* name, std::int64_t& to) {
    read(name, kNoneIsWrong, [&](py::handle x) { to = integer_argument(function_, name, x.ptr()); });
  }
  void boolean(const char* name, bool& to) {
    read(name, kNoneIsWrong, [&](py::handle x) { to = boolean_argument(function_, name, x.ptr()); });
  }
  void num_splits(int& to) {
    read("num_splits", kNoneIsDefault, [&](py::handle x) { to = num_splits_argument(function_, x.ptr()); });
  }
  void window(std::int64_t& left, std::int64_t& right) {
    read("window", kNoneIsWrong, [&](py::handle x) {
      const Window window = window_argument(function_, x.ptr());
      left = window.left;
      right = window.right;
    });
  }
  // None is as the head dim of queries and keys.
  void head_dim_v(std::int64_t head_dim, std::int64_t& to) {
    to = head_dim;
    read("head_dim_v", kNoneIsDefault, [&](py::handle x) { to = integer_argument(function_, "head_dim_v", x.ptr()); });
  }
  template <class Enum>
  void word(const char* name, Enum& to, std::initializer_list<const char*> words) {
    read(name, kNoneIsWrong, [&](py::handle x) { to = static_cast<Enum>(word_argument(function_, name, x, words)); });
  }
  void formats(const char* name, std::vector<KvFormat>& to) {
    read(name, kNoneIsDefault, [&](py::handle x) {
      if (!PyList_Check(x.ptr()) && !PyTuple_Check(x.ptr())) {
        fail_type(function_, name, std::string("must be a list of formats, got ") + Py_TYPE(x.ptr())->tp_name);
      }
      for (const py::handle each : x) to.push_back(format_argument(function_, name, each));
    });
  }
  // By its name, or by an element type, of which it is the own one.
  void format(const char* name, std::optional<KvFormat>& to) {
    read(name, kNoneIsDefault, [&](py::handle x) {
      const std::string given = type_name_argument(function_, name, x, "a format's name or an element type");
      for (int i = 0; i < kKvFormats; ++i) {
        const auto each = static_cast<KvFormat>(i);
        const DType dtype = kv_format_trait(each).dtype;
        if (own_format(dtype) == each && given == dtype_name(dtype)) to = each;
      }
      if (!to) to = format_argument(function_, name, py::str(given));
    });
  }

  // Throws where an option was given that none of the calls above named.
  void expect_no_other() const {
    for (const auto& [key, value] : given_) {
      const auto name = py::cast<std::string>(key);
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      std::string text = std::string(function_) + ": \"" + operation_ + "\" has no option " + name + "; it has ";
      for (std::size_t i = 0; i < known_.size(); ++i) text += (i == 0 ? "" : ", ") + known_[i];
      throw TypeError(text);
    }
  }

 private:
  enum None { kNoneIsDefault, kNoneIsWrong };

  template <class Read>
  void read(const char* name, None none, const Read& read_value) {
    known_.emplace_back(name);
    PyObject* value = PyDict_GetItemString(given_.ptr(), name);
    if (value == nullptr || (value == Py_None && none == kNoneIsDefault)) return;
    read_value(py::handle(value));
  }

  const char* function_;
  const char* operation_;
  py::dict given_;
  std::vector<std::string> known_;
};

DecodeQuery decode_query(Options& options) {
  DecodeQuery query;
  options.dtype("q_dtype", query.q_dtype);
  options.format("k_format", query.k_format);
  options.format("v_format", query.v_format);
  options.integer("head_dim", query.head_dim_qk);
  options.head_dim_v(query.head_dim_qk, query.head_dim_v);
  options.integer("group_size", query.group_size);
  options.integer("q_len", query.q_len);
  options.formats("segment_formats", query.segment_formats);
  options.boolean("scales_beside", query.scales_beside);
  options.integer("scale_group", query.scale_group);
  return query;
}

DecodeStage2Query decode_stage2_query(Options& options) {
  DecodeStage2Query query;
  options.dtype("out_dtype", query.out_dtype);
  return query;
}

AppendQuery append_query(Options& options) {
  AppendQuery query;
  options.dtype("dtype", query.dtype);
  options.format("k_format", query.k_format);
  options.format("v_format", query.v_format);
  options.integer("head_dim", query.head_dim_qk);
  options.head_dim_v(query.head_dim_qk, query.head_dim_v);
  options.boolean("scales_beside", query.scales_beside);
  return query;
}

template <bool kDequantize>
QuantizeQuery quantize_query(Options& options) {
  QuantizeQuery query;
  query.dequantize = kDequantize;
  std::optional<KvFormat> format;
  options.dtype("dtype", query.dtype);
  options.format("format", format);
  options.integer("head_dim", query.head_dim);
  query.format = format.value_or(query.format);
  return query;
}

MergeQuery merge_query(Options& options) {
  MergeQuery query;
  options.dtype("dtype", query.dtype);
  options.integer("head_dim", query.head_dim);
  return query;
}

template <class Query>
Query gated_delta_query(Options& options) {
  Query query;
  options.dtype("q_dtype", query.q_dtype);
  options.dtype("state_dtype", query.state_dtype);
  options.integer("head_dim_k", query.head_dim_k);
  options.head_dim_v(query.head_dim_k, query.head_dim_v);
  options.word("state_layout", query.state_layout, {"vk", "kv"});
  options.word("gate", query.gate, {"head", "key", "any"});
  return query;
}

AttentionQuery attention_query(Options& options) {
  AttentionQuery query;
  options.dtype("dtype", query.dtype);
  options.integer("head_dim", query.head_dim_qk);
  options.head_dim_v(query.head_dim_qk, query.head_dim_v);
  options.format("k_format", query.k_format);
  options.format("v_format", query.v_format);
  options.boolean("paged", query.paged);
  options.boolean("causal", query.causal);
  options.boolean("softcap", query.softcap);
  options.boolean("alibi", query.alibi);
  options.boolean("bias", query.bias);
  options.boolean("dropout", query.dropout);
  options.boolean("seqused_k", query.seqused_k);
  options.boolean("appends", query.appends);
  options.boolean("scales_beside", query.scales_beside);
  return query;
}

AttentionQuery attention_call_query(Options& options) {
  AttentionQuery query = attention_query(options);
  options.integer("q_len", query.q_len);
  options.integer("group_size", query.group_size);
  return query;
}

// What explain() is asked: the call, and its sizes.
DecodeScheduleQuery decode_schedule_query(Options& options) {
  DecodeScheduleQuery query{.call = decode_query(options)};
  options.integer("batch", query.batch);
  options.integer("num_kv_heads", query.num_kv_heads);
  options.integer("max_kv_len", query.max_kv_len);
  options.num_splits(query.num_splits);
  return query;
}

DecodeStage2ScheduleQuery decode_stage2_schedule_query(Options& options) {
  DecodeStage2ScheduleQuery query{.call = decode_stage2_query(options)};
  options.integer("batch", query.batch);
  options.integer("num_q_heads", query.num_q_heads);
  return query;
}

AppendScheduleQuery append_schedule_query(Options& options) {
  AppendScheduleQuery query{.call = append_query(options)};
  options.integer("tokens", query.tokens);
  options.integer("num_kv_heads", query.num_kv_heads);
  return query;
}

template <bool kDequantize>
QuantizeScheduleQuery quantize_schedule_query(Options& options) {
  QuantizeScheduleQuery query{.call = quantize_query<kDequantize>(options)};
  options.integer("rows", query.rows);
  return query;
}

MergeScheduleQuery merge_schedule_query(Options& options) {
  MergeScheduleQuery query{.call = merge_query(options)};
  options.integer("rows", query.rows);
  return query;
}

GatedDeltaScheduleQuery gated_delta_schedule_query(Options& options) {
  GatedDeltaScheduleQuery query{.call = gated_delta_query<GatedDeltaQuery>(options)};
  options.integer("batch", query.batch);
  options.integer("num_v_heads", query.num_v_heads);
  return query;
}

GatedDeltaChunkScheduleQuery gated_delta_chunk_schedule_query(Options& options) {
  GatedDeltaChunkScheduleQuery query{.call = gated_delta_query<GatedDeltaChunkQuery>(options)};
  options.integer("batch", query.batch);
  options.integer("num_heads", query.num_heads);
  options.integer("num_v_heads", query.num_v_heads);
  options.integer("tokens", query.tokens);
  options.boolean("packed", query.packed);
  return query;
}

AttentionScheduleQuery attention_schedule_query(Options& options) {
  AttentionScheduleQuery query{.call = attention_query(options)};
  options.integer("batch", query.batch);
  options.integer("num_q_heads", query.num_q_heads);
  options.integer("num_kv_heads", query.num_kv_heads);
  options.integer("q_len", query.q_len);
  options.integer("kv_len", query.kv_len);
  options.num_splits(query.num_splits);
  options.window(query.window_left, query.window_right);
  options.integer("total_q", query.total_q);
  options.integer("total_k", query.total_k);
  options.boolean("same_offsets", query.same_offsets);
  options.boolean("seqused_q", query.seqused_q);
  options.boolean("leftpad_k", query.leftpad_k);
  options.boolean("rotary", query.rotary);
  return query;
}

// The members of the package's dataclasses, in their order.
py::tuple members(const DecodeSchedule& s) {
  constexpr const char* kCombines[] = {"none", "launch", "second launch"};
  return py::make_tuple(s.kernel, s.rows, s.keys, s.stages, s.threads, s.teams, s.blocks, s.query_tiles, s.shared_bytes,
                        s.most_chunks, s.shortest_chunk, s.longest_chunk, kCombines[static_cast<int>(s.combine)],
                        s.workspace_bytes, s.text);
}

py::tuple members(const AttentionSchedule& s) {
  return py::make_tuple(s.kernel, s.rows, s.keys, s.stages, s.threads, s.blocks, s.work_tiles, s.shared_bytes, s.pieces,
                        s.workspace_bytes, s.text);
}

py::tuple members(const LaunchSchedule& s) {
  return py::make_tuple(s.kernel, s.threads, s.blocks, s.work, s.shared_bytes, s.workspace_bytes, s.text);
}

py::tuple members(const GatedDeltaSchedule& s) {
  return py::make_tuple(s.kernel, s.columns, s.threads, s.teams, s.slices, s.blocks, s.shared_bytes, s.workspace_bytes,
                        s.text);
}

py::tuple members(const GatedDeltaChunkSchedule& s) {
  return py::make_tuple(s.kernel, s.columns, s.threads, s.blocks, s.shared_bytes, s.prepare_kernel, s.prepare_threads,
                        s.prepare_teams, s.prepare_blocks, s.prepare_shared_bytes, s.chunk_tokens, s.chunks,
                        s.concurrent, s.workspace_bytes, s.text);
}

struct QueriedOperation {
  const char* name;
  Support (*supports)(Options&);
  std::string (*which_kernel)(Options&);
  py::tuple (*explain)(Options&);
};

template <auto kMakeQuery>
auto complete_query(Options& options) {
  auto query = kMakeQuery(options);
  query.target = "";
  options.target(query.target);
  options.expect_no_other();
  return query;
}

template <auto kMakeQuery>
auto complete_schedule_query(Options& options) {
  auto query = kMakeQuery(options);
  query.call.target = "";
  options.target(query.call.target);
  options.expect_no_other();
  return query;
}

template <auto kMakeQuery, auto kMakeScheduleQuery>
constexpr QueriedOperation queried(const char* name) {
  return {name, [](Options& options) { return supports(complete_query<kMakeQuery>(options)); },
          [](Options& options) { return which_kernel(complete_query<kMakeQuery>(options)); },
          [](Options& options) { return members(explain(complete_schedule_query<kMakeScheduleQuery>(options))); }};
}

constexpr QueriedOperation kOperations[] = {
    queried<decode_query, decode_schedule_query>("decode"),
    queried<decode_stage2_query, decode_stage2_schedule_query>("decode_stage2"),
    queried<append_query, append_schedule_query>("append"),
    queried<merge_query, merge_schedule_query>("merge"),
    queried<gated_delta_query<GatedDeltaQuery>, gated_delta_schedule_query>("gated_delta"),
    queried<gated_delta_query<GatedDeltaChunkQuery>, gated_delta_chunk_schedule_query>("gated_delta_chunk"),
    queried<attention_call_query, attention_schedule_query>("attention"),
    queried<quantize_query<false>, quantize_schedule_query<false>>("quantize"),
    queried<quantize_query<true>, quantize_schedule_query<true>>("dequantize"),
};

const QueriedOperation& operation_argument(const char* function, py::handle object) {
  std::array<const char*, std::size(kOperations)> names{};
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kOperations[i].name;
  return kOperations[word_argument(function, "operation", object, names)];
}

}  // namespace

void define_queries(py::module_& module) {
  module.def("supports", [](const py::object& name, const py::dict& given) {
    const QueriedOperation& operation = operation_argument("supports", name);
    Options options("supports", operation.name, given);
    const Support support = operation.supports(options);
    return py::make_tuple(support.supported, support.reason);
  });
  module.def("which_kernel", [](const py::object& name, const py::dict& given) {
    const QueriedOperation& operation = operation_argument("which_kernel", name);
    Options options("which_kernel", operation.name, given);
    return operation.which_kernel(options);
  });
  module.def("explain", [](const py::object& name, const py::dict& given) {
    const QueriedOperation& operation = operation_argument("explain", name);
    Options options("explain", operation.name, given);
    return operation.explain(options);
  });
  module.def("kv_format_blocks", [] {
    py::dict blocks;
    for (int i = 0; i < kKvFormats; ++i) {
      const auto format = static_cast<KvFormat>(i);
      blocks[kv_format_name(format)] = py::make_tuple(kv_format_trait(format).block_values, block_elements(format));
    }
    return blocks;
  });
}

}  // namespace flashport::python
