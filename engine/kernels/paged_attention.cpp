// One query token per request against the keys and values that its tokens have in the pool.
//
// Nothing is gathered: every key and value is read once, where it lies, in the order of the
// request's tokens. A request's result does not depend on who else is in the batch: each group of
// heads is one item of work, computed by one thread in one order.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr int kLanes = 16;
// Tokens whose scores are held before their values are read: the softmax moves on once a tile.
constexpr int kTile = 64;
// Vectors of queries and as many of sums that a thread holds: 32 registers is what AVX-512 has.
constexpr int kVectors = 16;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Of GCC and Clang on every machine; narrower hardware takes several registers for one.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const at::BFloat16* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  const Words wide = __builtin_convertvector(bits, Words) << 16;
  Floats values;
  std::memcpy(&values, &wide, sizeof values);
  return values;
}

// The slots of a request's tokens may lie anywhere: no hardware foresees the next.
constexpr int kAhead = 8;

template <int kBytes>
inline void prefetch(const void* from) {
  for (int offset = 0; offset < kBytes; offset += 64)
    __builtin_prefetch(static_cast<const char*>(from) + offset);
}

inline void store(float* to, const Floats& values) { std::memcpy(to, &values, sizeof values); }

inline void store(at::BFloat16* to, const Floats& values) {
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = values[lane];
}

inline float sum(const Floats& values) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight eight[2];
  std::memcpy(eight, &values, sizeof values);
  eight[0] += eight[1];
  Four four[2];
  std::memcpy(four, eight, sizeof four);
  four[0] += four[1];
  return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

// e^x for x <= 0: 2^n times a polynomial of degree 6 in what is left (the coefficients of Cephes'
// expf); e^-87 for all below, which beside the largest term of a softmax is nothing.
inline Floats exponential(Floats x) {
  const Floats least = Floats{} - 87.0f;
  x = x > least ? x : least;
  // Adding and taking away 1.5 * 2^23 rounds to a whole number.
  const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &power, sizeof scale);
  return y * scale;
}

// Where the keys and values of one key-value head lie.
template <typename T>
struct Cache {
  const T* keys;
  const T* values;
  int64_t key_stride;
  int64_t value_stride;
  const int32_t* slots;  // of the request's tokens, in order
};

// `kHeads` query heads that share a key-value head, each of 16 * kChunks numbers.
template <typename T, int kChunks, int kHeads>
void attend(const T* query, const Cache<T>& cache, int64_t first, int64_t last, float scale,
            T* out) {
  constexpr int kSize = kChunks * kLanes;
  Floats queries[kHeads][kChunks];
  Floats sums[kHeads][kChunks];
  float most[kHeads];
  float total[kHeads];
  alignas(64) float scores[kHeads][kTile];
  for (int head = 0; head < kHeads; ++head) {
    for (int c = 0; c < kChunks; ++c) {
      queries[head][c] = load(query + head * kSize + c * kLanes) * scale;
      sums[head][c] = Floats{};
    }
    most[head] = kNothing;
    total[head] = 0;
  }
  for (int64_t begin = first; begin < last; begin += kTile) {
    const int num = static_cast<int>(std::min<int64_t>(kTile, last - begin));
    for (int t = 0; t < num; ++t) {
      const T* key = cache.keys + cache.slots[begin + t] * cache.key_stride;
      if (begin + t + kAhead < last)
        prefetch<kSize * sizeof(T)>(cache.keys + cache.slots[begin + t + kAhead] * cache.key_stride);
      prefetch<kSize * sizeof(T)>(cache.values + cache.slots[begin + t] * cache.value_stride);
      Floats products[kHeads];
#pragma GCC unroll 16
      for (int head = 0; head < kHeads; ++head) products[head] = Floats{};
#pragma GCC unroll 16
      for (int c = 0; c < kChunks; ++c) {
        const Floats part = load(key + c * kLanes);
#pragma GCC unroll 16
        for (int head = 0; head < kHeads; ++head) products[head] += queries[head][c] * part;
      }
#pragma GCC unroll 16
      for (int head = 0; head < kHeads; ++head) scores[head][t] = sum(products[head]);
    }
    for (int head = 0; head < kHeads; ++head) {
      float* mine = scores[head];
      const float before = most[head];
      most[head] = std::max(before, *std::max_element(mine, mine + num));
      std::fill(mine + num, mine + kTile, most[head]);
      Floats parts = Floats{};
      for (int t = 0; t < kTile; t += kLanes) {
        store(mine + t, exponential(load(mine + t) - most[head]));
        for (int over = std::max(t, num); over < t + kLanes; ++over) mine[over] = 0;
        parts += load(mine + t);
      }
      const float keep = before == kNothing ? 0 : exponential(Floats{} + (before - most[head]))[0];
      total[head] = total[head] * keep + sum(parts);
      for (int c = 0; c < kChunks; ++c) sums[head][c] *= keep;
    }
    for (int t = 0; t < num; ++t) {
      const T* value = cache.values + cache.slots[begin + t] * cache.value_stride;
#pragma GCC unroll 16
      for (int c = 0; c < kChunks; ++c) {
        const Floats part = load(value + c * kLanes);
#pragma GCC unroll 16
        for (int head = 0; head < kHeads; ++head) sums[head][c] += scores[head][t] * part;
      }
    }
  }
  for (int head = 0; head < kHeads; ++head) {
    const float share = total[head] > 0 ? 1.0f / total[head] : 0.0f;
    for (int c = 0; c < kChunks; ++c)
      store(out + head * kSize + c * kLanes, sums[head][c] * share);
  }
}

// All query heads of a key-value head, as many at a time as fit into registers.
template <typename T, int kChunks>
void attend_all(const T* query, const Cache<T>& cache, int64_t first, int64_t last, float scale,
                int64_t num_heads, T* out) {
  constexpr int kMost = std::max(1, std::min(4, kVectors / kChunks));
  constexpr int kSize = kChunks * kLanes;
  int64_t head = 0;
  while (head < num_heads) {
    const T* from = query + head * kSize;
    T* to = out + head * kSize;
    const int64_t left = num_heads - head;
    if (kMost >= 4 && left >= 4) {
      attend<T, kChunks, std::min(4, kMost)>(from, cache, first, last, scale, to);
      head += 4;
    } else if (kMost >= 3 && left >= 3) {
      attend<T, kChunks, std::min(3, kMost)>(from, cache, first, last, scale, to);
      head += 3;
    } else if (kMost >= 2 && left >= 2) {
      attend<T, kChunks, std::min(2, kMost)>(from, cache, first, last, scale, to);
      head += 2;
    } else {
      attend<T, kChunks, 1>(from, cache, first, last, scale, to);
      head += 1;
    }
  }
}

struct Sizes {
  int64_t num_requests, num_heads, num_kv_heads, table_width, window;
  float scale;
};

template <typename T, int kChunks>
void decode_all(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                const at::Tensor& table, const at::Tensor& rows, const at::Tensor& lengths,
                at::Tensor& out, const Sizes& sizes) {
  constexpr int kSize = kChunks * kLanes;
  const int64_t group = sizes.num_heads / sizes.num_kv_heads;
  const int64_t* length = lengths.data_ptr<int64_t>();
  // The longest first: whoever is done takes the next, so nobody is left alone with a long one.
  std::vector<int64_t> order(sizes.num_requests);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t one, int64_t other) { return length[one] > length[other]; });
  const int64_t num_items = sizes.num_requests * sizes.num_kv_heads;
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t item = next++; item < num_items; item = next++) {
      const int64_t request = order[item / sizes.num_kv_heads];
      const int64_t kv_head = item % sizes.num_kv_heads;
      const int64_t at = (request * sizes.num_heads + kv_head * group) * kSize;
      const int64_t last = length[request];
      const int64_t first = sizes.window < 0 ? 0 : std::max<int64_t>(0, last - sizes.window);
      const Cache<T> cache{
          keys.data_ptr<T>() + kv_head * keys.stride(1),
          values.data_ptr<T>() + kv_head * values.stride(1), keys.stride(0), values.stride(0),
          table.data_ptr<int32_t>() + rows.data_ptr<int64_t>()[request] * sizes.table_width};
      attend_all<T, kChunks>(query.data_ptr<T>() + at, cache, first, last, sizes.scale, group,
                             out.data_ptr<T>() + at);
    }
  };
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_items);
  if (num_threads <= 1) {
    work();
  } else {
    at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) work();
    });
  }
}

template <typename T>
void decode_sized(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                  const at::Tensor& table, const at::Tensor& rows, const at::Tensor& lengths,
                  at::Tensor& out, const Sizes& sizes) {
  switch (query.size(2)) {
    case 16: return decode_all<T, 1>(query, keys, values, table, rows, lengths, out, sizes);
    case 32: return decode_all<T, 2>(query, keys, values, table, rows, lengths, out, sizes);
    case 64: return decode_all<T, 4>(query, keys, values, table, rows, lengths, out, sizes);
    case 80: return decode_all<T, 5>(query, keys, values, table, rows, lengths, out, sizes);
    case 96: return decode_all<T, 6>(query, keys, values, table, rows, lengths, out, sizes);
    case 128: return decode_all<T, 8>(query, keys, values, table, rows, lengths, out, sizes);
    case 256: return decode_all<T, 16>(query, keys, values, table, rows, lengths, out, sizes);
    default: TORCH_CHECK(false, "head size ", query.size(2), " is none of those built");
  }
}

void check(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
           const at::Tensor& table, const at::Tensor& rows, const at::Tensor& lengths,
           const at::Tensor& out) {
  TORCH_CHECK(query.dim() == 3 && keys.dim() == 3 && values.dim() == 3 && table.dim() == 2,
              "query, keys and values have three dimensions, table two");
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.size(2) == query.size(2) &&
                  keys.size(1) > 0 && query.size(1) % keys.size(1) == 0,
              "keys and values are alike, and query heads share them evenly");
  TORCH_CHECK(query.is_contiguous() && out.is_contiguous() && out.sizes() == query.sizes(),
              "query and out are contiguous and alike");
  TORCH_CHECK(keys.stride(2) == 1 && values.stride(2) == 1 && table.stride(1) == 1,
              "heads and rows of the table lie together");
  TORCH_CHECK(query.scalar_type() == keys.scalar_type() &&
                  query.scalar_type() == values.scalar_type() &&
                  query.scalar_type() == out.scalar_type(),
              "one type for all");
  TORCH_CHECK(table.scalar_type() == at::kInt && rows.scalar_type() == at::kLong &&
                  lengths.scalar_type() == at::kLong && rows.is_contiguous() &&
                  lengths.is_contiguous() && rows.size(0) == query.size(0) &&
                  lengths.size(0) == query.size(0),
              "an int32 table, int64 rows and lengths, one for each request");
}

void decode(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
            const at::Tensor& table, const at::Tensor& rows, const at::Tensor& lengths,
            at::Tensor out, double scale, int64_t window) {
  check(query, keys, values, table, rows, lengths, out);
  const Sizes sizes{query.size(0),   query.size(1), keys.size(1),
                    table.stride(0), window,        static_cast<float>(scale)};
  if (query.scalar_type() == at::kFloat) {
    decode_sized<float>(query, keys, values, table, rows, lengths, out, sizes);
  } else {
    TORCH_CHECK(query.scalar_type() == at::kBFloat16, "float32 or bfloat16");
    decode_sized<at::BFloat16>(query, keys, values, table, rows, lengths, out, sizes);
  }
}

}  // namespace

TORCH_LIBRARY(jitserve, library) {
  library.def(
      "paged_decode(Tensor query, Tensor keys, Tensor values, Tensor table, Tensor rows, "
      "Tensor lengths, Tensor(a!) out, float scale, int window) -> ()",
      &decode);
}
