// How does a CPU do the work between two matrix products in one pass over memory?
//
// native_cpu.py compiles this file with the machine's own C++ compiler and calls it. PyTorch's
// operators are general, so each step of a computation is a pass of its own over all numbers, and a
// call of its own. Here each of four parts of a layer is one loop:
//
//     add_rms_norm      the residual addition and the norm after it
//     rope_and_store    norm of queries and keys, rotary embedding, keys and values to their slots
//     paged_attention   attention over keys that lie scattered in blocks
//     silu_and_mul      the activation between the products of an MLP
//
// Each is held to its plain version: in layers.py, and for attention in attention.py. Sums are made
// in float32. Numbers are float32 or bfloat16, tensors are contiguous.
//
// vLLM: csrc/cpu/ (layernorm.cpp, pos_encoding.cpp, activation.cpp, cpu_attn.cpp).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <omp.h>
#include <sched.h>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;           // numbers of the widest vector that a core computes with
#else
constexpr int LANES = 8;
#endif
constexpr int TILE = 16;            // keys between two updates of the maximum
constexpr int FEW = 4;              // queries that attend_few computes together
constexpr int MAX_DIM = 1024;       // numbers of a head
constexpr int CACHE_LINE = 64;      // bytes
constexpr int SMALL_WORK = 1 << 15; // numbers; less is done by one core, at once
constexpr const char* TOO_WIDE = "attention_backend 'native' takes heads of up to 1024 numbers";

typedef float Vector __attribute__((vector_size(4 * LANES), may_alias));
typedef float VectorInMemory __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bfloat16 x) {  // the upper half of a float32
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

struct fp8 {  // e4m3: a float32 but for its exponent, which is smaller by 120
    uint8_t bits;
};

inline float to_float(fp8 x) {
    uint32_t bits = uint32_t(x.bits & 0x80) << 24 | uint32_t(x.bits & 0x7F) << 20;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result * 0x1p120f;
}

inline float to_float(int8_t x) { return x; }

inline void from_float(float x, fp8* to) {  // |x| <= 448: to the nearest, ties to even
    const float small = x * 0x1p-120f;
    uint32_t bits;
    std::memcpy(&bits, &small, sizeof bits);
    to->bits = (bits >> 24 & 0x80) | ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20 & 0x7F);
}

inline void from_float(float x, int8_t* to) { *to = int8_t(std::nearbyint(x)); }

inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, bfloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to->bits = x == x ? uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : uint16_t(0x7FC0);
}

// x as T holds it: where the plain version has a tensor of T between two operations.
template <typename T>
inline float rounded(float x) {
    T result;
    from_float(x, &result);
    return to_float(result);
}

// e^x for x <= 0, to 2 units in the last place; compilers turn a loop of it into vectors. x is
// k ln(2) + r: 2^k is put together from its bits, and e^r, for |r| <= ln(2) / 2, is a polynomial
// (its Taylor series). ln(2) is subtracted in two parts, so that r is exact.
inline float exp_negative(float x) {
    const float k = std::floor((x >= -87.0f ? x : 0.0f) * 1.44269504f + 0.5f);
    float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(k) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : p * power;  // a NaN is not below: it stays one
}

// To the second cache of the core: there is room for more than in the first.
inline void prefetch(const void* from, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// -- norms, rotary embedding, activation --

template <typename T>
void rms_norm(const T* x, const T* weight, int size, float eps, T* output) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < size; i++) squares += to_float(x[i]) * to_float(x[i]);
    const float scale = 1 / std::sqrt(squares / size + eps);
#pragma omp simd
    for (int i = 0; i < size; i++)
        from_float(rounded<T>(to_float(x[i]) * scale) * to_float(weight[i]), &output[i]);
}

template <typename T>
void add_rms_norm(int num_tokens, int size, T* x, const T* residual, const T* weight, float eps,
                  T* output) {
#pragma omp parallel for if (int64_t(num_tokens) * size > SMALL_WORK)
    for (int token = 0; token < num_tokens; token++) {
        T* sum = x + size_t(token) * size;
        const T* before = residual + size_t(token) * size;
#pragma omp simd
        for (int i = 0; i < size; i++) from_float(to_float(sum[i]) + to_float(before[i]), &sum[i]);
        rms_norm(sum, weight, size, eps, output + size_t(token) * size);
    }
}

struct RopeSizes {
    int num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, rope_stride, block_size;
    int num_blocks;
    float eps;
};

// Turn the first rotary_dim numbers of a head: x cos + (x with its halves exchanged) sin. The sign
// of the first half is in `sin` (see layers.apply_rope).
template <typename T>
void turn(const T* x, const T* cos, const T* sin, int dim, int rotary_dim, T* output) {
    const int half = rotary_dim / 2;
#pragma omp simd
    for (int i = 0; i < half; i++) {
        const float a = to_float(x[i]), b = to_float(x[i + half]);
        const float b_cos = rounded<T>(b * to_float(cos[i + half]));
        from_float(rounded<T>(a * to_float(cos[i])) + b * to_float(sin[i]), &output[i]);
        from_float(b_cos + a * to_float(sin[i + half]), &output[i + half]);
    }
    std::copy(x + rotary_dim, x + dim, output + rotary_dim);
}

// A key or value as numbers of 8 bits and their scale: attention.quantize_rows for one row.
template <typename T, typename C>
void quantize(const T* x, int dim, C* numbers, float* scale) {
    float largest = 0, wrong = 0;  // wrong: NaN if a number is none, or infinite
#pragma omp simd reduction(max : largest) reduction(+ : wrong)
    for (int d = 0; d < dim; d++) {
        largest = std::max(largest, std::fabs(to_float(x[d])));
        wrong += to_float(x[d]) * 0;
    }
    *scale = largest / (std::is_same<C, int8_t>::value ? 127.0f : 448.0f) + wrong;
    const float divisor = std::max(*scale, std::numeric_limits<float>::min());
#pragma omp simd
    for (int d = 0; d < dim; d++) from_float(to_float(x[d]) / divisor, &numbers[d]);
}

// T: type of the model, C: of the cache. Nothing is stored for a slot that does not exist.
template <typename T, typename C>
const char* rope_and_store(const RopeSizes& s, const T* qkv, const T* norm_weight, const T* cos,
                           const T* sin, const int64_t* slot_mapping, C* key_cache, C* value_cache,
                           float* key_scales, float* value_scales, T* query) {
    const int dim = s.head_dim, num_rows = s.num_heads + 2 * s.num_kv_heads;
    const int64_t num_slots = int64_t(s.num_blocks) * s.block_size;
    if (dim > MAX_DIM) return TOO_WIDE;
    bool is_right = true;
#pragma omp parallel for reduction(&& : is_right) \
    if (int64_t(s.num_tokens) * num_rows * dim > SMALL_WORK)
    for (int token = 0; token < s.num_tokens; token++) {
        const int64_t slot = slot_mapping[token];
        if (slot >= num_slots) {
            is_right = false;
            continue;
        }
        const size_t block = slot < 0 ? 0 : slot / s.block_size, offset = slot % s.block_size;
        for (int row = 0; row < num_rows; row++) {
            const T* x = qkv + (size_t(token) * num_rows + row) * dim;
            const int kv_head = (row - s.num_heads) % s.num_kv_heads;
            const bool is_query = row < s.num_heads, is_key = row < s.num_heads + s.num_kv_heads;
            if (!is_query && slot < 0) continue;  // not to be stored
            T normed[MAX_DIM], turned[MAX_DIM];
            T* output = is_query ? query + (size_t(token) * s.num_heads + row) * dim : turned;
            const size_t place = (block * s.num_kv_heads + kv_head) * s.block_size + offset;
            C* stored = (is_key ? key_cache : value_cache) + place * dim;
            if constexpr (std::is_same<T, C>::value)
                if (!is_query) output = stored;
            if (is_key) {
                if (norm_weight != nullptr) {
                    rms_norm(x, norm_weight + size_t(row) * dim, dim, s.eps, normed);
                    x = normed;
                }
                const size_t at = size_t(token) * s.rope_stride;
                turn(x, cos + at, sin + at, dim, s.rotary_dim, output);
            } else {
                std::copy(x, x + dim, output);
            }
            if constexpr (!std::is_same<T, C>::value)
                if (!is_query)
                    quantize(output, dim, stored, (is_key ? key_scales : value_scales) + place);
        }
    }
    return is_right ? nullptr : "slot_mapping names a slot that the KV cache does not have";
}

template <typename T>
void silu_and_mul(int num_tokens, int size, const T* gate_up, T* output) {
#pragma omp parallel for if (int64_t(num_tokens) * size > SMALL_WORK)
    for (int token = 0; token < num_tokens; token++) {
        const T *gate = gate_up + size_t(token) * 2 * size, *up = gate + size;
        T* row = output + size_t(token) * size;
#pragma omp simd
        for (int i = 0; i < size; i++) {
            const float x = to_float(gate[i]), e = exp_negative(-std::fabs(x));
            const float silu = x * (x < 0 ? e : 1) / (1 + e);
            from_float(rounded<T>(silu) * to_float(up[i]), &row[i]);
        }
    }
}

// -- attention: a few queries of a sequence walk through its blocks together. Each query keeps a
// running maximum, a running sum and a weighted sum of values (online softmax, as in
// attention_triton.py).
//
//     block table of the sequence    [ 7 | 3 | 9 ]
//     walk                           keys and values of block 7, then of 3, then of 9
//     for each tile of 16 keys       top = max(top, scores)
//                                    sum, mixed: scaled by exp(old top - top), then added to
//
// A "query" is one query head of one token. Queries that share a key head (GQA), of neighbouring
// tokens, are a task. What a task reads is converted to float32 once, a tile at a time, and stays
// in the first cache of its core. Two functions do the same with vectors that lie differently:
//
//                    for             a lane is             score
//     attend_few     decodes         a number of a head    sum over the lanes of query * key
//     attend_many    prompts, GQA    a query               sum over d of queries[d] * key[d]

struct Sizes {  // of one call
    int num_seqs, num_heads, key_dim, num_blocks, block_size, num_kv_heads, value_dim;
    int table_stride, sliding_window;  // window: keys that a token sees at most; 0: all
    float scale, soft_cap;  // soft_cap 0: none
};

template <typename C>
struct Cache {  // keys or values
    const C* numbers;
    const float* scales;  // of numbers of 8 bits
};

struct Task {
    int token, num_tokens, num_keys;  // num_keys: up to the last token's own
    const int32_t* blocks;
    int kv_head, head, num_heads;  // query heads from `head` on

    int num_queries() const { return num_tokens * num_heads; }
    // The row of a query in the tensor of all; the keys that it sees are [begin, end).
    size_t row(int query, const Sizes& s) const {
        return size_t(token + query / num_heads) * s.num_heads + head + query % num_heads;
    }
    int end(int query) const { return num_keys - num_tokens + 1 + query / num_heads; }
    int begin(int query, const Sizes& s) const {
        return s.sliding_window ? std::max(0, end(query) - s.sliding_window) : 0;
    }
};

int round_up(int size) { return (size + LANES - 1) / LANES * LANES; }

// A tile of `number` vectors as float32, where they lie or in `room`. Zeros fill the tile, and each
// vector up to whole lanes. `next` is what will be read after them: it is fetched meanwhile.
template <typename C>
const float* read_tile(const Cache<C>& cache, size_t at, size_t next, int number, int dim,
                       float* room) {
    const int width = round_up(dim);
    const bool is_whole = number == TILE && width == dim;
    for (int i = 0; i < number; i++) {
        const C* from = cache.numbers + (at + i) * dim;
        prefetch(cache.numbers + (next + i) * dim, dim * sizeof(C));
        if (std::is_same<C, float>::value && is_whole) continue;
        const float scale = sizeof(C) == 1 ? cache.scales[at + i] : 1;
#pragma omp simd
        for (int d = 0; d < dim; d++) room[i * width + d] = to_float(from[d]) * scale;
        std::fill(room + i * width + dim, room + (i + 1) * width, 0.0f);
    }
    if constexpr (std::is_same<C, float>::value)
        if (is_whole) return cache.numbers + at * dim;
    std::fill(room + number * width, room + TILE * width, 0.0f);
    return room;
}

// Calls use_keys(position, number, tile) and use_values(tile) for each tile that a task sees.
// Returns false if the block table names a block that does not exist.
template <typename C, typename UseKeys, typename UseValues>
bool walk(const Sizes& s, const Cache<C>& keys, const Cache<C>& values, const Task& task,
          UseKeys use_keys, UseValues use_values) {
    alignas(CACHE_LINE) float tile[TILE * MAX_DIM];
    size_t at = 0, next = 0;
    const auto find = [&](int position, size_t* slot) {
        const int block = task.blocks[position / s.block_size];
        *slot = (size_t(block) * s.num_kv_heads + task.kv_head) * s.block_size +
                position % s.block_size;
        return block >= 0 && block < s.num_blocks;
    };
    int position = task.begin(0, s), end = task.num_keys;
    if (position < end && !find(position, &next)) return false;
    for (int number; position < end; position += number) {
        number = std::min({TILE, s.block_size - position % s.block_size, end - position});
        at = next;
        if (position + number < end && !find(position + number, &next)) return false;
        use_keys(position, number, read_tile(keys, at, next, number, s.key_dim, tile));
        use_values(read_tile(values, at, next, number, s.value_dim, tile));
    }
    return true;
}

inline float cap(float score, float soft_cap) { return soft_cap * std::tanh(score / soft_cap); }

inline Vector exp_each(Vector x) {
    float* lanes = reinterpret_cast<float*>(&x);
#pragma omp simd
    for (int i = 0; i < LANES; i++) lanes[i] = exp_negative(lanes[i]);
    return x;
}

// Which lanes of two vectors `half` lanes apart are added: see sum_each.
struct Pairs {
    Integers low[LANES / 2 + 1], high[LANES / 2 + 1];
    Pairs() {
        for (int half = 1; half < LANES; half *= 2)
            for (int lane = 0; lane < LANES; lane++) {
                low[half][lane] = lane & half ? LANES + lane - half : lane;
                high[half][lane] = low[half][lane] + half;
            }
    }
} const PAIRS;

// The sum of each of LANES vectors, as the lanes of one. A round adds the halves of every sum, and
// puts two vectors into one. For 4 vectors, a to d, of 4 lanes:
//
//     x[0]    a0 a1 a2 a3    half 2    a0+a2 a1+a3 c0+c2 c1+c3    half 1    a b c d
//     x[1]    b0 b1 b2 b3              b0+b2 b1+b3 d0+d2 d1+d3
//     x[2]    c0 c1 c2 c3
//     x[3]    d0 d1 d2 d3
inline Vector sum_each(Vector* x) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            x[i] = __builtin_shuffle(x[i], x[i + half], PAIRS.low[half]) +
                   __builtin_shuffle(x[i], x[i + half], PAIRS.high[half]);
    return x[0];
}

template <typename T, typename C>
bool attend_few(const Sizes& s, const Cache<C>& keys, const Cache<C>& values, const Task& task,
                const T* query, T* output) {
    const int parts = round_up(s.key_dim) / LANES, value_parts = round_up(s.value_dim) / LANES;
    const int num_queries = task.num_queries();
    Vector q[FEW][MAX_DIM / LANES], mixed[FEW][MAX_DIM / LANES];
    float top[FEW], sum[FEW] = {};
    for (int i = 0; i < num_queries; i++) {
        std::fill_n(q[i], parts, Vector{});
        std::fill_n(mixed[i], value_parts, Vector{});
        float* numbers = reinterpret_cast<float*>(q[i]);
        const T* row = query + task.row(i, s) * s.key_dim;
        for (int d = 0; d < s.key_dim; d++) numbers[d] = to_float(row[d]) * s.scale;
        top[i] = -INFINITY;
    }
    Vector scores[FEW][TILE / LANES];
    const auto use_keys = [&](int position, int number, const float* tile) {
        const auto* key = reinterpret_cast<const VectorInMemory*>(tile);
        for (int i = 0; i < num_queries; i++) {
            for (int first = 0; first < TILE; first += LANES) {
                Vector sums[LANES];
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) sums[j] = q[i][0] * key[(first + j) * parts];
                for (int part = 1; part < parts; part++)
#pragma GCC unroll 16
                    for (int j = 0; j < LANES; j++)
                        sums[j] += q[i][part] * key[(first + j) * parts + part];
                scores[i][first / LANES] = sum_each(sums);
            }
            float* weights = reinterpret_cast<float*>(scores[i]);
            const int begin = task.begin(i, s) - position;
            const int end = std::min(number, task.end(i) - position);
            if (s.soft_cap != 0)
                for (int j = 0; j < TILE; j++) weights[j] = cap(weights[j], s.soft_cap);
            for (int j = 0; j < std::min(begin, TILE); j++) weights[j] = -INFINITY;
            for (int j = std::max(end, 0); j < TILE; j++) weights[j] = -INFINITY;
            float some[4] = {top[i], top[i], top[i], top[i]};  // four maxima, which do not wait
            for (int j = 0; j < TILE; j += 4)
#pragma omp simd
                for (int k = 0; k < 4; k++) some[k] = std::max(some[k], weights[j + k]);
            const float highest = std::max(std::max(some[0], some[1]), std::max(some[2], some[3]));
            const float from = highest == -INFINITY ? 0 : highest;  // -inf - -inf would be NaN
            const float kept = exp_negative(top[i] - from);
            float added = 0;
#pragma omp simd reduction(+ : added)
            for (int j = 0; j < TILE; j++) {
                weights[j] = exp_negative(weights[j] - from);
                added += weights[j];
            }
            sum[i] = sum[i] * kept + added;
            for (int part = 0; part < value_parts; part++) mixed[i][part] *= kept;
            top[i] = highest;
        }
    };
    const auto use_values = [&](const float* tile) {
        const auto* value = reinterpret_cast<const VectorInMemory*>(tile);
        for (int i = 0; i < num_queries; i++) {
            const float* weights = reinterpret_cast<const float*>(scores[i]);
            for (int part = 0; part < value_parts; part++) {
                Vector a = mixed[i][part], b{};  // two sums, which do not wait
#pragma GCC unroll 8
                for (int j = 0; j < TILE; j += 2) {
                    a += weights[j] * value[j * value_parts + part];
                    b += weights[j + 1] * value[(j + 1) * value_parts + part];
                }
                mixed[i][part] = a + b;
            }
        }
    };
    if (!walk(s, keys, values, task, use_keys, use_values)) return false;
    for (int i = 0; i < num_queries; i++) {
        const float* numbers = reinterpret_cast<const float*>(mixed[i]);
        T* row = output + task.row(i, s) * s.value_dim;
        for (int d = 0; d < s.value_dim; d++) from_float(numbers[d] / sum[i], &row[d]);
    }
    return true;
}

template <typename T, typename C>
bool attend_many(const Sizes& s, const Cache<C>& keys, const Cache<C>& values, const Task& task,
                 const T* query, T* output) {
    const int room = round_up(s.key_dim), value_room = round_up(s.value_dim);
    Vector q[MAX_DIM], mixed[MAX_DIM], scores[TILE], top = Vector{} - INFINITY, sum{};
    Integers begin{}, end{};  // of the keys that a query sees
    std::fill_n(q, s.key_dim, Vector{});
    std::fill_n(mixed, value_room, Vector{});
    for (int i = 0; i < task.num_queries(); i++) {
        const T* row = query + task.row(i, s) * s.key_dim;
        for (int d = 0; d < s.key_dim; d++) q[d][i] = to_float(row[d]) * s.scale;
        begin[i] = task.begin(i, s), end[i] = task.end(i);
    }
    const auto use_keys = [&](int position, int number, const float* tile) {
        Vector highest = top;
        for (int first = 0; first < TILE; first += 8) {  // eight sums, which do not wait
            Vector a[8] = {};
            for (int d = 0; d < s.key_dim; d++)
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) a[j] += tile[(first + j) * room + d] * q[d];
            for (int j = 0; j < 8; j++) {
                const int key = position + first + j;
                if (s.soft_cap != 0)
                    for (int i = 0; i < LANES; i++) a[j][i] = cap(a[j][i], s.soft_cap);
                const Integers sees = (key >= begin) & (key < end) & -(first + j < number);
                scores[first + j] = sees ? a[j] : Vector{} - INFINITY;
                highest = highest > scores[first + j] ? highest : scores[first + j];
            }
        }
        const Vector from = highest == -INFINITY ? Vector{} : highest;
        const Vector kept = exp_each(top - from);
        top = highest;
        sum *= kept;
        for (int j = 0; j < TILE; j++) {
            scores[j] = exp_each(scores[j] - from);
            sum += scores[j];
        }
        for (int d = 0; d < value_room; d++) mixed[d] *= kept;
    };
    const auto use_values = [&](const float* tile) {
        for (int d = 0; d < value_room; d += 8) {
            Vector a[8];
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) a[j] = mixed[d + j];
            for (int i = 0; i < TILE; i++)
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) a[j] += tile[i * value_room + d + j] * scores[i];
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) mixed[d + j] = a[j];
        }
    };
    if (!walk(s, keys, values, task, use_keys, use_values)) return false;
    for (int i = 0; i < task.num_queries(); i++) {
        T* row = output + task.row(i, s) * s.value_dim;
        for (int d = 0; d < s.value_dim; d++) from_float(mixed[d][i] / sum[i], &row[d]);
    }
    return true;
}

template <typename T, typename C>
const char* paged_attention(const Sizes& s, const Cache<C>& keys, const Cache<C>& values,
                            const T* query, const int32_t* query_start_loc,
                            const int32_t* seq_lens, const int32_t* block_table, T* output) {
    if (std::max(s.key_dim, s.value_dim) > MAX_DIM) return TOO_WIDE;
    const int group = s.num_heads / s.num_kv_heads, most = std::max(1, LANES / group);
    std::vector<Task> tasks;
    for (int seq = 0; seq < s.num_seqs; seq++) {
        const int start = query_start_loc[seq], end = query_start_loc[seq + 1];
        const int32_t* blocks = block_table + size_t(seq) * s.table_stride;
        for (int token = start; token < end; token += most) {
            const int num_tokens = std::min(most, end - token);
            const int num_keys = seq_lens[seq] - (end - token) + num_tokens;
            for (int kv_head = 0; kv_head < s.num_kv_heads; kv_head++)
                for (int head = 0; head < group; head += LANES)
                    tasks.push_back({token, num_tokens, num_keys, blocks, kv_head,
                                     kv_head * group + head, std::min(LANES, group - head)});
        }
    }
    const int num_tasks = tasks.size();
    bool is_right = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : is_right)
    for (int i = num_tasks - 1; i >= 0; i--) {  // a prompt's last tokens see the most keys
        const auto attend = tasks[i].num_queries() <= FEW ? attend_few<T, C> : attend_many<T, C>;
        is_right &= attend(s, keys, values, tasks[i], query, output);
    }
    return is_right ? nullptr : "the block table names a block that the KV cache does not have";
}

}  // namespace

// What Python calls: for each function one for float32 (f32) and one for bfloat16 (bf16); what
// reads or writes a cache is there for each type of cache. They return what is wrong, or null.
//
//     add_rms_norm       x (which becomes the sum), residual, output [num_tokens, size]
//                        weight [size]
//     silu_and_mul       gate_up [num_tokens, 2 * size], output [num_tokens, size]
//     rope_and_store     qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
//                        norm_weight [num_heads + num_kv_heads, head_dim], or null
//                        cos, sin: rope_stride numbers from token to token
//                        slot_mapping [num_tokens]; negative: do not store
//                        query [num_tokens, num_heads, head_dim]
//     paged_attention    query [num_tokens, num_heads, key_dim], output [.., value_dim]
//                        query_start_loc [num_seqs + 1], seq_lens [num_seqs]
//                        block_table: table_stride numbers from sequence to sequence
//     both               caches [num_blocks, num_kv_heads, block_size, dim]
//                        scales [num_blocks, num_kv_heads, block_size]; null but for 8 bits
#define EXPORT(T, NAME)                                                                            \
    extern "C" const char* add_rms_norm_##NAME(int num_tokens, int size, float eps, T* x,          \
                                               const T* residual, const T* weight, T* output) {    \
        add_rms_norm(num_tokens, size, x, residual, weight, eps, output);                          \
        return nullptr;                                                                            \
    }                                                                                              \
    extern "C" const char* silu_and_mul_##NAME(int num_tokens, int size, const T* gate_up,         \
                                               T* output) {                                        \
        silu_and_mul(num_tokens, size, gate_up, output);                                           \
        return nullptr;                                                                            \
    }

#define EXPORT_CACHE(T, C, NAME)                                                                   \
    extern "C" const char* rope_and_store_##NAME(                                                  \
        int num_tokens, int num_heads, int num_kv_heads, int head_dim, int rotary_dim,             \
        int rope_stride, int block_size, int num_blocks, float eps, const T* qkv,                  \
        const T* norm_weight, const T* cos, const T* sin, const int64_t* slot_mapping,             \
        C* key_cache, C* value_cache, float* key_scales, float* value_scales, T* query) {          \
        return rope_and_store(RopeSizes{num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, \
                                        rope_stride, block_size, num_blocks, eps},                 \
                              qkv, norm_weight, cos, sin, slot_mapping, key_cache, value_cache,    \
                              key_scales, value_scales, query);                                    \
    }                                                                                              \
    extern "C" const char* paged_attention_##NAME(                                                 \
        int num_seqs, int num_heads, int key_dim, int num_blocks, int block_size,                  \
        int num_kv_heads, int value_dim, int table_stride, int sliding_window, float scale,        \
        float soft_cap, const T* query, const C* key_cache, const C* value_cache,                  \
        const float* key_scales, const float* value_scales, const int32_t* query_start_loc,        \
        const int32_t* seq_lens, const int32_t* block_table, T* output) {                          \
        return paged_attention<T, C>(                                                              \
            Sizes{num_seqs, num_heads, key_dim, num_blocks, block_size, num_kv_heads, value_dim,   \
                  table_stride, sliding_window, scale, soft_cap},                                  \
            {key_cache, key_scales}, {value_cache, value_scales}, query, query_start_loc,          \
            seq_lens, block_table, output);                                                        \
    }

EXPORT(float, f32)
EXPORT(bfloat16, bf16)
EXPORT_CACHE(float, float, f32_f32)
EXPORT_CACHE(float, int8_t, f32_int8)
EXPORT_CACHE(float, fp8, f32_fp8)
EXPORT_CACHE(bfloat16, bfloat16, bf16_bf16)
EXPORT_CACHE(bfloat16, int8_t, bf16_int8)
EXPORT_CACHE(bfloat16, fp8, bf16_fp8)

// Thread i of a team, but not thread 0, which calls, runs on core i of those that it may run on.
extern "C" const char* bind_threads(int number) {
    cpu_set_t allowed;
    std::vector<int> cores;
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    if (number > int(cores.size())) return nullptr;
#pragma omp parallel num_threads(number)
    if (const int thread = omp_get_thread_num()) {
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(cores[thread], &only);
        sched_setaffinity(0, sizeof only, &only);
    }
    return nullptr;
}
