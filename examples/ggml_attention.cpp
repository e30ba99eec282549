// ggml's attention by the C interface: buffers described by ne and nb, the standard operation with its four inputs and
// that of a mixed cache with six, each against a plain loop over the same bytes. tests/consumer builds and runs it
// against an installed flashport.
//
// ggml counts axes from the fastest one: q is [D, n_tokens, n_heads, batch], k and v are [D, n_kv, n_kv_heads, batch],
// views of a cache [D, n_kv_heads, n_kv], and the result is [D, n_heads, n_tokens, batch]. flashport takes (batch,
// tokens, heads, D) with any strides, so that no byte has to move. More than 16 tokens go to fp_attention, with the
// mask as its bias.
#include <flashport/capi.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

namespace {

enum class Type { kF32, kF16, kQ8_0, kQ4_0 };

struct Sizes {
  fp_dtype dtype;
  fp_kv_format format;
  int block_values;
  int block_bytes;
};

Sizes sizes_of(Type type) {
  switch (type) {
    case Type::kF32: return {fp_float32, fp_format_fp32, 1, 4};
    case Type::kF16: return {fp_float16, fp_format_fp16, 1, 2};
    case Type::kQ8_0: return {fp_uint8, fp_format_q8_0, 32, 34};
    case Type::kQ4_0: return {fp_uint8, fp_format_q4_0, 32, 18};
  }
  return {};
}

// A ggml_tensor, as far as attention looks at it.
struct Tensor {
  std::vector<unsigned char>* data;
  Type type;
  std::int64_t ne[4];
  std::size_t nb[4];

  const unsigned char* row(std::int64_t i1, std::int64_t i2, std::int64_t i3) const {
    return data->data() + i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
  }
};

Tensor dense(std::vector<unsigned char>& data, Type type, std::int64_t ne0, std::int64_t ne1, std::int64_t ne2,
             std::int64_t ne3) {
  const Sizes sizes = sizes_of(type);
  Tensor t{&data, type, {ne0, ne1, ne2, ne3}, {static_cast<std::size_t>(sizes.block_bytes)}};
  t.nb[1] = ne0 / sizes.block_values * sizes.block_bytes;
  t.nb[2] = t.nb[1] * ne1;
  t.nb[3] = t.nb[2] * ne2;
  data.assign(t.nb[3] * ne3, 0);
  return t;
}

// ggml_permute(t, 0, 2, 1, 3)
Tensor permuted(Tensor t) {
  std::swap(t.ne[1], t.ne[2]);
  std::swap(t.nb[1], t.nb[2]);
  return t;
}

// The tensor in flashport's order: axes[i] is ggml's axis of axis i, the last one is ggml's axis 0.
fp_tensor view(const Tensor& t, const int (&axes)[4]) {
  const Sizes sizes = sizes_of(t.type);
  const std::int64_t unit = sizes.block_values > 1 ? 1 : sizes.block_bytes;  // strides count elements, of blocks bytes
  fp_tensor view{};
  view.data = t.data->data();
  view.dtype = sizes.dtype;
  view.rank = 4;
  for (int i = 0; i < 4; ++i) {
    view.shape[i] = t.ne[axes[i]];
    view.strides[i] = static_cast<std::int64_t>(t.nb[axes[i]]) / unit;
  }
  if (sizes.block_values > 1) view.shape[3] = t.ne[0] / sizes.block_values * sizes.block_bytes;
  view.strides[3] = 1;
  return view;
}

constexpr int kTokensFirst[4] = {3, 1, 2, 0};  // (batch, tokens, heads, D) of q, k, v
constexpr int kHeadsFirst[4] = {3, 2, 1, 0};   // the same of the result, and (batch, heads, tokens, keys) of a mask

// ggml's slopes of the mask.
std::vector<float> slopes(std::int64_t heads, double max_bias) {
  std::int64_t power = 1;
  while (power * 2 <= heads) power *= 2;
  std::vector<float> found;
  for (std::int64_t h = 0; h < heads; ++h) {
    const double exponent = h < power ? (h + 1.0) / power : (2.0 * (h - power) + 1) / (2.0 * power);
    found.push_back(max_bias > 0 ? static_cast<float>(std::exp2(-max_bias * exponent)) : 1.0f);
  }
  return found;
}

struct Options {
  double scale;
  double max_bias;
  double logit_softcap;
};

// The parts of a cache, the oldest first: one for the standard operation, two for that of a mixed cache.
struct Part {
  const Tensor* k;
  const Tensor* v;
};

fp_status attend(const Tensor& q, const std::vector<Part>& parts, const Tensor& mask, const Options& options,
                 const Tensor& result) {
  const fp_tensor queries = view(q, kTokensFirst), out = view(result, kHeadsFirst), added = view(mask, kHeadsFirst);
  std::vector<fp_tensor> tensors;
  tensors.reserve(2 * parts.size());
  std::vector<fp_decode_segment> segments;
  for (const Part& part : parts) {
    fp_decode_segment segment{};  // without lengths: all keys of the view, of which the mask hides some
    tensors.push_back(view(*part.k, kTokensFirst));
    segment.k = &tensors.back();
    tensors.push_back(view(*part.v, kTokensFirst));
    segment.v = &tensors.back();
    segment.k_format = sizes_of(part.k->type).format;
    segment.v_format = sizes_of(part.v->type).format;
    segments.push_back(segment);
  }
  std::vector<float> factors = slopes(q.ne[2], options.max_bias);
  fp_tensor mask_slopes{};
  mask_slopes.data = factors.data();
  mask_slopes.dtype = fp_float32;
  mask_slopes.rank = 1;
  mask_slopes.shape[0] = q.ne[2];
  mask_slopes.strides[0] = 1;
  fp_mixed_decode_args call;
  FP_INIT(&call);
  call.segment_size = sizeof(fp_decode_segment);
  call.q = &queries;
  call.segments = segments.data();
  call.num_segments = static_cast<std::int64_t>(segments.size());
  call.out = &out;
  call.mask = &added;
  call.mask_slopes = &mask_slopes;
  call.has_softmax_scale = 1;
  call.softmax_scale = options.scale;
  call.softcap = options.logit_softcap;
  return fp_flash_decode_mixed(&call, 0);
}

// From here on: numbers, and the plain loop.

float half_to_float(const unsigned char* bytes) {
  std::uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float sign = bits >> 15 != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25));
}

// For numbers that fp16 holds.
void float_to_half(float x, unsigned char* bytes) {
  std::uint16_t bits = 0x7C00;  // infinity
  int exponent = 0;
  if (x == 0) {
    bits = 0;
  } else if (!std::isinf(x)) {
    const float fraction = std::frexp(std::fabs(x), &exponent);
    bits = static_cast<std::uint16_t>((exponent + 14) << 10 | (static_cast<int>(fraction * 2048) & 1023));
  }
  if (std::signbit(x)) bits |= 0x8000;
  std::memcpy(bytes, &bits, 2);
}

double value(const Tensor& t, std::int64_t i0, std::int64_t i1, std::int64_t i2, std::int64_t i3) {
  const unsigned char* row = t.row(i1, i2, i3);
  if (t.type == Type::kF16) return half_to_float(row + 2 * i0);
  if (t.type == Type::kF32) {
    float x;
    std::memcpy(&x, row + 4 * i0, 4);
    return x;
  }
  const unsigned char* block = row + i0 / 32 * sizes_of(t.type).block_bytes;
  const std::int64_t i = i0 % 32;
  if (t.type == Type::kQ8_0) return half_to_float(block) * static_cast<signed char>(block[2 + i]);
  const int pair = block[2 + i % 16];
  return half_to_float(block) * ((i < 16 ? pair & 15 : pair >> 4) - 8);
}

std::mt19937 engine(1);

// A multiple of 1/64, which fp16 holds.
float random_number() { return static_cast<float>(static_cast<int>(engine() % 257) - 128) / 64; }

void fill(const Tensor& t) {
  const std::int64_t rows = t.ne[1] * t.ne[2] * t.ne[3];
  std::vector<float> x(rows * t.ne[0]);
  for (float& each : x) each = random_number();
  if (t.type == Type::kF32) std::memcpy(t.data->data(), x.data(), 4 * x.size());
  if (t.type == Type::kF16) {
    for (std::size_t i = 0; i < x.size(); ++i) float_to_half(x[i], t.data->data() + 2 * i);
  }
  if (sizes_of(t.type).block_values == 1 || rows == 0) return;
  fp_tensor from{}, to{};
  from.data = x.data();
  from.dtype = fp_float32;
  from.rank = to.rank = 2;
  from.shape[0] = to.shape[0] = rows;
  from.shape[1] = from.strides[0] = t.ne[0];
  from.strides[1] = to.strides[1] = 1;
  to.data = t.data->data();
  to.dtype = fp_uint8;
  to.shape[1] = to.strides[0] = static_cast<std::int64_t>(t.nb[1]);
  fp_quantize_kv_args call;
  FP_INIT(&call);
  call.x = &from;
  call.out = &to;
  call.format = sizes_of(t.type).format;
  if (fp_quantize_kv(&call, 0) != fp_ok) std::printf("ggml_attention: %s\n", fp_last_error());
}

// The largest error of the result against ggml's definition in double precision.
double error_of(const Tensor& q, const std::vector<Part>& parts, const Tensor& mask, const Options& options,
                const Tensor& result) {
  const std::int64_t group = q.ne[2] / parts[0].k->ne[2];
  const std::vector<float> factors = slopes(q.ne[2], options.max_bias);
  double worst = 0;
  for (std::int64_t b = 0; b < q.ne[3]; ++b) {
    for (std::int64_t h = 0; h < q.ne[2]; ++h) {
      for (std::int64_t t = 0; t < q.ne[1]; ++t) {
        std::vector<double> out(result.ne[0]);
        double sum = 0;
        std::int64_t column = 0;
        for (const Part& part : parts) {
          for (std::int64_t key = 0; key < part.k->ne[1]; ++key, ++column) {
            double score = 0;
            for (std::int64_t d = 0; d < q.ne[0]; ++d) {
              score += value(q, d, t, h, b) * value(*part.k, d, key, h / group, b);
            }
            score *= options.scale;
            if (options.logit_softcap > 0) score = options.logit_softcap * std::tanh(score / options.logit_softcap);
            const double weight = std::exp(score + factors[h] * value(mask, column, t, 0, 0));
            sum += weight;
            for (std::int64_t d = 0; d < result.ne[0]; ++d) out[d] += weight * value(*part.v, d, key, h / group, b);
          }
        }
        for (std::int64_t d = 0; d < result.ne[0]; ++d) {
          const double apart = std::fabs(value(result, d, h, t, b) - out[d] / sum);
          if (!(apart <= worst)) worst = apart;
        }
      }
    }
  }
  return worst;
}

bool check(const char* name, Type older, std::int64_t older_keys, std::int64_t tokens, const Options& options) {
  constexpr std::int64_t kDim = 64, kDimV = 96, kHeads = 6, kKvHeads = 2, kHot = 40, kBatch = 2, kPadded = 64;
  std::vector<unsigned char> bytes[7];
  const Tensor q = permuted(dense(bytes[0], Type::kF32, kDim, kHeads, tokens, kBatch));
  const Tensor k = permuted(dense(bytes[1], Type::kF16, kDim, kKvHeads, kHot, kBatch));
  const Tensor v = permuted(dense(bytes[2], Type::kF16, kDimV, kKvHeads, kHot, kBatch));
  const Tensor mask = dense(bytes[3], Type::kF16, older_keys + kHot, kPadded, 1, 1);
  const Tensor k_quant = permuted(dense(bytes[4], older, kDim, kKvHeads, older_keys, kBatch));
  const Tensor v_quant = permuted(dense(bytes[5], older, kDimV, kKvHeads, older_keys, kBatch));
  const Tensor result = dense(bytes[6], Type::kF32, kDimV, kHeads, tokens, kBatch);
  for (const Tensor* each : {&q, &k, &v, &k_quant, &v_quant}) fill(permuted(*each));
  for (std::int64_t row = 0; row < kPadded; ++row) {  // rows past the tokens are padding, and hold anything
    for (std::int64_t key = 0; key < mask.ne[0]; ++key) {
      const bool seen = key == 0 || engine() % 3 != 0;
      float_to_half(row < tokens && seen ? -static_cast<float>(engine() % 8) / 4 : -INFINITY,
                    bytes[3].data() + row * mask.nb[1] + 2 * key);
    }
  }
  std::vector<Part> parts;
  if (older_keys > 0) parts.push_back({&k_quant, &v_quant});
  parts.push_back({&k, &v});
  if (attend(q, parts, mask, options, result) != fp_ok) {
    std::printf("%s: %s\n", name, fp_last_error());
    return false;
  }
  const double error = error_of(q, parts, mask, options, result);
  std::printf("%-40s %3lld + %lld keys, %2lld tokens: largest error %.1e\n", name, static_cast<long long>(older_keys),
              static_cast<long long>(kHot), static_cast<long long>(tokens), error);
  return error < 2e-5;
}

}  // namespace

int main() {
  const Options plain{0.125, 0, 0}, all{0.1, 8, 5};
  bool good = check("standard, 4 inputs", Type::kF16, 0, 1, plain);
  good = check("standard, slopes and softcap", Type::kF16, 0, 5, all) && good;
  good = check("mixed, 6 inputs, q8_0", Type::kQ8_0, 100, 1, plain) && good;
  good = check("mixed, q4_0", Type::kQ4_0, 33, 16, plain) && good;
  good = check("mixed, q8_0, slopes and softcap", Type::kQ8_0, 70, 3, all) && good;
  std::printf("ggml_attention: %s\n", good ? "good" : "failed");
  return good ? 0 : 1;
}
