// How does a CPU do the work between two matrix products in one pass over memory?
//
// native_cpu.py compiles this file with the machine's own C++ compiler and calls it. PyTorch's
// operators are general, so each step of a computation is a pass of its own over all numbers, and a
// call of its own. Here each of four parts of a layer is one loop:
//
//     add_rms_norm      the residual addition and the norm after it
//     rope_and_store    norm of queries and keys, rotary embedding, keys and values to their slots
//     paged_decode      attention of single queries over scattered keys
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

constexpr int TILE = 16;            // keys between two updates of the maximum
constexpr int MAX_GROUP = 16;       // query heads that are attended to together
constexpr int MAX_DIM = 1024;       // numbers of a head
constexpr int CACHE_LINE = 64;      // bytes
constexpr int SMALL_WORK = 1 << 15; // numbers; less is done by one core, at once
constexpr const char* TOO_WIDE = "attention_backend 'native' takes heads of up to 1024 numbers";

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

inline void prefetch(const void* from, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(from) + i);
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

// -- attention: a token walks through the blocks of its sequence and keeps, for each query head, a
// running maximum, a running sum and a weighted sum of values (online softmax, as in Triton's).
//
//     block table of the sequence    [ 7 | 3 | 9 ]
//     walk                           keys and values of block 7, then of 3, then of 9
//     after each tile of keys        top = max(top, scores)
//                                    sum, mixed: scaled by exp(old top - top), then added to
//
// A tile of a cache of 8 bits is decoded once, for all query heads that read it.
//
// Nothing is copied together. Each (token, key head) is a task of its own; the query heads that
// share a key head (GQA) find its keys in the cache of their core.

struct Sizes {  // of one call
    int num_seqs, max_queries, num_heads, key_dim, num_blocks, block_size, num_kv_heads, value_dim;
    int table_stride, sliding_window;  // window: keys that a token sees at most; 0: all
    float scale, soft_cap;  // soft_cap 0: none
};

struct Task {
    int token, num_keys;  // num_keys: up to the token's own
    const int32_t* blocks;
};

// `number` vectors of 8 bits times their scales.
template <typename C>
void dequantize(const C* from, const float* scales, int number, int dim, float* to) {
    for (int i = 0; i < number; i++)
#pragma omp simd
        for (int d = 0; d < dim; d++) to[i * dim + d] = to_float(from[i * dim + d]) * scales[i];
}

// One token, one key head, and `group` of the query heads that read it. Returns false if the block
// table names a block that does not exist. T: type of the query, C: of the cache.
template <typename T, typename C, int DIM>
bool attend(const Sizes& s, const T* query, const C* key_cache, const C* value_cache,
            const float* key_scales, const float* value_scales, const int32_t* blocks,
            int num_keys, int kv_head, int group, T* output) {
    constexpr bool IS_SCALED = sizeof(C) == 1;
    constexpr int ROOM = DIM ? DIM : MAX_DIM;
    using Number = typename std::conditional<IS_SCALED, float, C>::type;
    Number decoded_keys[IS_SCALED ? TILE * ROOM : 1], decoded_values[IS_SCALED ? TILE * ROOM : 1];
    constexpr int LANES = DIM && DIM < 128 ? 8 : 16;  // one vector; wide ones take longer to add up
    const int dim = DIM ? DIM : s.key_dim, value_dim = DIM ? DIM : s.value_dim;
    float q[MAX_GROUP][ROOM], mixed[MAX_GROUP][ROOM], top[MAX_GROUP], sum[MAX_GROUP];
    for (int head = 0; head < group; head++) {
        for (int d = 0; d < dim; d++) q[head][d] = to_float(query[head * dim + d]) * s.scale;
        std::fill_n(mixed[head], value_dim, 0.0f);
        top[head] = -INFINITY;
        sum[head] = 0;
    }
    const int first = s.sliding_window ? std::max(0, num_keys - s.sliding_window) : 0;
    for (int position = first, number; position < num_keys; position += number) {
        const int offset = position % s.block_size, *block = blocks + position / s.block_size;
        number = std::min({TILE, s.block_size - offset, num_keys - position});
        if (*block < 0 || *block >= s.num_blocks) return false;
        const size_t at = (size_t(*block) * s.num_kv_heads + kv_head) * s.block_size + offset;
        const Number *keys = decoded_keys, *values = decoded_values;
        if constexpr (IS_SCALED) {
            dequantize(key_cache + at * dim, key_scales + at, number, dim, decoded_keys);
            dequantize(value_cache + at * value_dim, value_scales + at, number, value_dim,
                       decoded_values);
        } else {
            keys = key_cache + at * dim;
            values = value_cache + at * value_dim;
        }
        // What comes after these keys and values is fetched while they are read, bit by bit.
        const C *next_keys = nullptr, *next_values = nullptr;
        if (num_keys - position > s.block_size && block[1] >= 0 && block[1] < s.num_blocks) {
            const size_t row = size_t(block[1]) * s.num_kv_heads + kv_head;
            const size_t next = row * s.block_size + offset;
            next_keys = key_cache + next * dim, next_values = value_cache + next * value_dim;
        }
        for (int head = 0; head < group; head++) {
            float weight[TILE], highest = top[head], added = 0, sums[ROOM];
            int i = 0;
            for (; i + 4 <= number; i += 4) {  // four keys at once: four sums that do not wait
                const Number* key = keys + i * dim;
                if (head == 0 && next_keys) prefetch(next_keys + i * dim, sizeof(C) * 4 * dim);
                float a = 0, b = 0, c = 0, e = 0;
#pragma omp simd reduction(+ : a, b, c, e) simdlen(LANES)
                for (int d = 0; d < dim; d++) {
                    a += q[head][d] * to_float(key[d]);
                    b += q[head][d] * to_float(key[dim + d]);
                    c += q[head][d] * to_float(key[2 * dim + d]);
                    e += q[head][d] * to_float(key[3 * dim + d]);
                }
                weight[i] = a, weight[i + 1] = b, weight[i + 2] = c, weight[i + 3] = e;
            }
            for (; i < number; i++) {
                float score = 0;
#pragma omp simd reduction(+ : score)
                for (int d = 0; d < dim; d++) score += q[head][d] * to_float(keys[i * dim + d]);
                weight[i] = score;
            }
            for (i = 0; i < number; i++) {
                if (s.soft_cap != 0) weight[i] = s.soft_cap * std::tanh(weight[i] / s.soft_cap);
                highest = std::max(highest, weight[i]);
            }
            const float from = highest == -INFINITY ? 0 : highest;  // -inf - -inf would be NaN
            const float kept = sum[head] == 0 ? 0 : exp_negative(top[head] - from);
#pragma omp simd reduction(+ : added)
            for (int i = 0; i < number; i++) {
                weight[i] = exp_negative(weight[i] - from);
                added += weight[i];
            }
#pragma omp simd
            for (int d = 0; d < value_dim; d++) sums[d] = mixed[head][d] * kept;
            for (i = 0; i + 4 <= number; i += 4) {
                const Number* value = values + i * value_dim;
                if (head == 0 && next_values)
                    prefetch(next_values + i * value_dim, sizeof(C) * 4 * value_dim);
#pragma omp simd
                for (int d = 0; d < value_dim; d++)
                    sums[d] += weight[i] * to_float(value[d]) +
                               weight[i + 1] * to_float(value[value_dim + d]) +
                               weight[i + 2] * to_float(value[2 * value_dim + d]) +
                               weight[i + 3] * to_float(value[3 * value_dim + d]);
            }
            for (; i < number; i++) {
                const Number* value = values + i * value_dim;
#pragma omp simd
                for (int d = 0; d < value_dim; d++) sums[d] += weight[i] * to_float(value[d]);
            }
            std::copy(sums, sums + value_dim, mixed[head]);
            top[head] = highest;
            sum[head] = sum[head] * kept + added;
        }
    }
    for (int head = 0; head < group; head++)
        for (int d = 0; d < value_dim; d++)
            from_float(mixed[head][d] / sum[head], &output[head * value_dim + d]);
    return true;
}

template <typename T, typename C, int DIM>
const char* attend_all(const Sizes& s, const T* query, const C* key_cache, const C* value_cache,
                       const float* key_scales, const float* value_scales,
                       const int32_t* query_start_loc, const int32_t* seq_lens,
                       const int32_t* block_table, T* output) {
    std::vector<Task> tasks;
    double total = 0;
    for (int seq = 0; seq < s.num_seqs; seq++) {
        const int start = query_start_loc[seq], end = query_start_loc[seq + 1];
        if (end - start > s.max_queries) continue;
        for (int token = start; token < end; token++) {
            const int num_keys = seq_lens[seq] - (end - token) + 1;
            tasks.push_back({token, num_keys, block_table + size_t(seq) * s.table_stride});
            total += num_keys;
        }
    }
    if (std::max(s.key_dim, s.value_dim) > MAX_DIM) return TOO_WIDE;
    const int group = s.num_heads / s.num_kv_heads, num_tasks = tasks.size();
    bool is_right = true;
#pragma omp parallel for collapse(2) schedule(dynamic) reduction(&& : is_right) \
    if (total * s.num_heads * s.key_dim > SMALL_WORK)
    for (int i = 0; i < num_tasks; i++)
        for (int kv_head = 0; kv_head < s.num_kv_heads; kv_head++)
            for (int head = 0; head < group; head += MAX_GROUP) {
                const Task& task = tasks[i];
                const size_t at = size_t(task.token) * s.num_heads + kv_head * group + head;
                is_right &= attend<T, C, DIM>(
                    s, query + at * s.key_dim, key_cache, value_cache, key_scales, value_scales,
                    task.blocks, task.num_keys, kv_head, std::min(MAX_GROUP, group - head),
                    output + at * s.value_dim);
            }
    return is_right ? nullptr : "the block table names a block that the KV cache does not have";
}

template <typename T, typename C, typename... Arguments>
const char* paged_decode(const Sizes& s, Arguments... arguments) {  // loops of known length are unrolled
    switch (s.key_dim == s.value_dim ? s.key_dim : 0) {
        case 32: return attend_all<T, C, 32>(s, arguments...);
        case 64: return attend_all<T, C, 64>(s, arguments...);
        case 80: return attend_all<T, C, 80>(s, arguments...);
        case 128: return attend_all<T, C, 128>(s, arguments...);
        default: return attend_all<T, C, 0>(s, arguments...);
    }
}

}  // namespace

// What Python calls: for each function one for float32 (f32) and one for bfloat16 (bf16); what
// reads or writes a cache is there for each type of cache. They return what is wrong, or null.
//
// x (which becomes the sum), residual, output [num_tokens, size]; weight [size].
//
// gate_up [num_tokens, 2 * size]; output [num_tokens, size].
//
// qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; norm_weight [num_heads + num_kv_heads,
// head_dim] or null; cos, sin: rope_stride numbers from token to token; slot_mapping [num_tokens],
// negative: do not store; caches [num_blocks, num_kv_heads, block_size, head_dim]; scales (of
// caches of 8 bits, else null) [num_blocks, num_kv_heads, block_size]; query [num_tokens,
// num_heads, head_dim].
//
// query [num_tokens, num_heads, key_dim], output [.., value_dim]; query_start_loc [num_seqs + 1];
// seq_lens [num_seqs]; block_table: table_stride numbers from sequence to sequence. Sequences with
// more than max_queries queries are passed over.
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
    extern "C" const char* paged_decode_##NAME(                                                    \
        int num_seqs, int max_queries, int num_heads, int key_dim, int num_blocks, int block_size, \
        int num_kv_heads, int value_dim, int table_stride, int sliding_window, float scale,        \
        float soft_cap, const T* query, const C* key_cache, const C* value_cache,                  \
        const float* key_scales, const float* value_scales, const int32_t* query_start_loc,        \
        const int32_t* seq_lens, const int32_t* block_table, T* output) {                          \
        return paged_decode<T, C>(                                                                 \
            Sizes{num_seqs, max_queries, num_heads, key_dim, num_blocks, block_size, num_kv_heads, \
                  value_dim, table_stride, sliding_window, scale, soft_cap},                       \
            query, key_cache, value_cache, key_scales, value_scales, query_start_loc, seq_lens,    \
            block_table, output);                                                                  \
    }

EXPORT(float, f32)
EXPORT(bfloat16, bf16)
EXPORT_CACHE(float, float, f32_f32)
EXPORT_CACHE(float, int8_t, f32_int8)
EXPORT_CACHE(float, fp8, f32_fp8)
EXPORT_CACHE(bfloat16, bfloat16, bf16_bf16)
EXPORT_CACHE(bfloat16, int8_t, bf16_int8)
EXPORT_CACHE(bfloat16, fp8, bf16_fp8)

// Thread i of a team, but not thread 0, which calls, runs on cores[i] from now on.
extern "C" const char* bind_threads(int number, const int* cores) {
#pragma omp parallel num_threads(number)
    if (const int thread = omp_get_thread_num()) {
        cpu_set_t only;
        CPU_ZERO(&only);
        CPU_SET(cores[thread], &only);
        sched_setaffinity(0, sizeof only, &only);
    }
    return nullptr;
}
