// Rows of fp32 or bf16 to int8 codes and a scale: the bits of glm5_kernels.int8.
#pragma once
#include "int8_tiles.h"
#include "rows.h"

namespace glm5::GLM5_SET {

// Rows of codes, each padded with zeros to whole steps; sums of the codes of each row.
struct Codes {
  int64_t tokens, pitch;  // pitch: bytes from row to row
  Buffer<int8_t> codes;
  Buffer<float> scales;
  Buffer<int32_t> sums;

  Codes(int64_t tokens, int64_t k)
      : tokens(tokens), pitch(round_up(k, kStep)), codes(tokens * pitch), scales(tokens), sums(tokens) {}
  int8_t* row(int64_t token) const { return codes + pitch * token; }
};

// How a static layer quantizes: x / scale + offset.
struct StaticScale {
  float scale, offset;
};

// codes [round_up(k, kStep)] <- round(x / scale + offset), ties to even, saturating, 0 for NaN; returns their sum.
template <class Element>
GLM5_INLINE int32_t codes_of(const void* x, int64_t k, StaticScale by, int8_t* codes) {
  const F32x16 scale = F32x16::broadcast(by.scale), offset = F32x16::broadcast(by.offset);
  const F32x16 least = F32x16::broadcast(-128.0f), most = F32x16::broadcast(127.0f);
  I32x16 total{};
  const auto coded = [&](F32x16 value) GLM5_INLINED {
    const F32x16 whole = if_number(rint(value / scale + offset), F32x16::zero());
    return to_int(smaller(larger(whole, least), most));
  };
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    const I32x16 code = coded(Element::load(x, i));
    store_int8(codes + i, code);
    total += code;
  }
  if (i < k) {
    int8_t end[kLanes];
    store_int8(end, coded(load_columns<Element>(x, i, k - i)));
    int32_t sum = 0;
    for (int64_t j = 0; i + j < k; ++j) sum += codes[i + j] = end[j];
    total.v[0][0] += sum;
  }
  std::memset(codes + k, 0, static_cast<size_t>(round_up(k, kStep) - k));
  return sum(total);
}

// Row `token` of `out` <- x [k], by a scale of its own (max|x| / 127) or by `given`, where the scale of the row is 1.
template <class Element>
void quantize_row(const void* x, int64_t k, const StaticScale* given, const Codes& out, int64_t token) {
  StaticScale by{1.0f, 0.0f};
  if (given) {
    by = *given;
  } else {
    const float peak = largest_magnitude<Element>(x, k);
    by.scale = peak < 1e-8f ? 1e-8f / 127.0f : peak / 127.0f;
    if (!(peak < __builtin_inff())) by.scale = __builtin_nanf("");
  }
  out.sums[token] = codes_of<Element>(x, k, by, out.row(token));
  out.scales[token] = given ? 1.0f : by.scale;
}

// Rows of x [tokens, k] as codes.
inline void quantize_rows(const Rows& x, int64_t k, const StaticScale* given, const Codes& out) {
  constexpr int64_t kElements = 1 << 18;  // of a task
  with_floats(x.dtype, [&](auto element) {
    parallel_for(out.tokens, kElements / max(k, 1), [&](int64_t first, int64_t last, int) {
      for (int64_t token = first; token < last; ++token)
        quantize_row<decltype(element)>(row_at(x, 0, token), k, given, out, token);
    });
  });
}

}  // namespace glm5::GLM5_SET
