// How does a decode read scattered keys on a CPU, in one pass?
//
// native_cpu.py compiles this file with the machine's own C++ compiler and calls it. The algorithm is
// that of the Triton kernel: a token walks through the blocks of its sequence and keeps, for each of
// its query heads, a running maximum, a running sum and a weighted sum of values (online softmax).
//
//     block table of the token's sequence   [ 7 | 3 | 9 ]
//     walk                                  keys and values of block 7, then of 3, then of 9
//     after each tile of keys               top = max(top, scores)
//                                           sum, mixed: scaled by exp(old top - top), then added to
//
// Nothing is copied together, and no score is written to memory. Each (token, key head) is a task of
// its own for OpenMP; the query heads that share a key head (GQA) share its keys in the cache of a
// core. Sums are made in float32, whatever the dtype of the cache is.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int TILE = 16;        // keys between two updates of the maximum
constexpr int MAX_GROUP = 16;   // query heads that share a key head
constexpr int MAX_DIM = 256;    // numbers of a head
constexpr int CACHE_LINE = 64;  // bytes

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

inline void from_float(float x, float* to) { *to = x; }

inline void from_float(float x, bfloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to->bits = x == x ? uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) : uint16_t(0x7FC0);
}

// e^x for x <= 0, to 2 units in the last place; compilers turn a loop of it into vectors. 2^k is put
// together from its bits, e^r for |r| <= ln(2) / 2 is a polynomial (its Taylor series).
inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float k = std::floor(x * 1.44269504f + 0.5f);
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
    return p * power;
}

inline void prefetch(const void* from, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i += CACHE_LINE)
        __builtin_prefetch(static_cast<const char*>(from) + i);
}

struct Sizes {  // of one call
    int num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks, max_blocks;
    int sliding_window;  // keys that a token sees at most; 0: all
    float scale, soft_cap;  // soft_cap 0: none
};

// One token and one key head. Returns false if the block table names a block that does not exist.
template <typename T, int HEAD_DIM>
bool attend(const Sizes& s, const T* query, const T* key_cache, const T* value_cache,
            const int32_t* blocks, int num_keys, int kv_head, T* output) {
    const int dim = HEAD_DIM ? HEAD_DIM : s.head_dim;
    const int group = s.num_heads / s.num_kv_heads;
    float q[MAX_GROUP][HEAD_DIM ? HEAD_DIM : MAX_DIM], mixed[MAX_GROUP][HEAD_DIM ? HEAD_DIM : MAX_DIM];
    float top[MAX_GROUP], sum[MAX_GROUP];
    for (int head = 0; head < group; head++) {
        for (int d = 0; d < dim; d++) {
            q[head][d] = to_float(query[head * dim + d]) * s.scale;
            mixed[head][d] = 0;
        }
        top[head] = -INFINITY;
        sum[head] = 0;
    }
    const int first = s.sliding_window ? std::max(0, num_keys - s.sliding_window) : 0;
    for (int position = first, number; position < num_keys; position += number) {
        const int offset = position % s.block_size, block = blocks[position / s.block_size];
        number = std::min({TILE, s.block_size - offset, num_keys - position});
        if (block < 0 || block >= s.num_blocks) return false;
        const size_t at = ((size_t(block) * s.num_kv_heads + kv_head) * s.block_size + offset) * dim;
        const T *keys = key_cache + at, *values = value_cache + at;
        if (offset == 0 && position + s.block_size < num_keys) {
            const int next = blocks[position / s.block_size + 1];
            if (next >= 0 && next < s.num_blocks) {
                const size_t size = size_t(s.block_size) * dim;
                const size_t then = (size_t(next) * s.num_kv_heads + kv_head) * size;
                prefetch(key_cache + then, size * sizeof(T));
                prefetch(value_cache + then, size * sizeof(T));
            }
        }
        for (int head = 0; head < group; head++) {
            float weight[TILE], highest = top[head];
            for (int i = 0; i < number; i++) {
                float score = 0;
#pragma omp simd reduction(+ : score)
                for (int d = 0; d < dim; d++) score += q[head][d] * to_float(keys[i * dim + d]);
                if (s.soft_cap != 0) score = s.soft_cap * std::tanh(score / s.soft_cap);
                weight[i] = score;
                highest = score > highest ? score : highest;
            }
            const float kept = top[head] == -INFINITY ? 0 : exp_negative(top[head] - highest);
            float added = 0;
            for (int i = number; i < TILE; i++) weight[i] = -INFINITY;
#pragma omp simd reduction(+ : added)
            for (int i = 0; i < TILE; i++) {
                weight[i] = i < number ? exp_negative(weight[i] - highest) : 0;
                added += weight[i];
            }
            float sums[HEAD_DIM ? HEAD_DIM : MAX_DIM];
#pragma omp simd
            for (int d = 0; d < dim; d++) sums[d] = mixed[head][d] * kept;
            for (int i = 0; i < number; i++) {
#pragma omp simd
                for (int d = 0; d < dim; d++) sums[d] += weight[i] * to_float(values[i * dim + d]);
            }
#pragma omp simd
            for (int d = 0; d < dim; d++) mixed[head][d] = sums[d];
            top[head] = highest;
            sum[head] = sum[head] * kept + added;
        }
    }
    for (int head = 0; head < group; head++)
        for (int d = 0; d < dim; d++)
            from_float(mixed[head][d] / sum[head], &output[head * dim + d]);
    return true;
}

template <typename T, int HEAD_DIM>
bool attend_all(const Sizes& s, const T* query, const T* key_cache, const T* value_cache,
                const int32_t* block_table, const int32_t* table_row, const int32_t* num_keys,
                T* output) {
    const int group_size = s.num_heads / s.num_kv_heads * s.head_dim;
    bool is_right = true;
#pragma omp parallel for collapse(2) schedule(dynamic) reduction(&& : is_right)
    for (int token = 0; token < s.num_tokens; token++)
        for (int head = 0; head < s.num_kv_heads; head++) {
            const size_t at = (size_t(token) * s.num_kv_heads + head) * group_size;
            const int32_t* blocks = block_table + size_t(table_row[token]) * s.max_blocks;
            is_right = attend<T, HEAD_DIM>(s, query + at, key_cache, value_cache, blocks,
                                           num_keys[token], head, output + at) && is_right;
        }
    return is_right;
}

template <typename T, typename... Arguments>
bool choose(const Sizes& s, Arguments... arguments) {  // loops of known length are unrolled
    switch (s.head_dim) {
        case 32: return attend_all<T, 32>(s, arguments...);
        case 64: return attend_all<T, 64>(s, arguments...);
        case 80: return attend_all<T, 80>(s, arguments...);
        case 128: return attend_all<T, 128>(s, arguments...);
        default: return attend_all<T, 0>(s, arguments...);
    }
}

}  // namespace

// query, output [num_tokens, num_heads, head_dim]; caches [num_blocks, num_kv_heads, block_size,
// head_dim]; block_table [.., max_blocks]; table_row [num_tokens]: the row of each token's sequence;
// num_keys [num_tokens]: the keys up to the token's own. All contiguous. Returns 0, or 1 if the block
// table names a block that does not exist.
extern "C" int paged_decode(int is_bfloat16, const void* query, const void* key_cache,
                            const void* value_cache, const int32_t* block_table,
                            const int32_t* table_row, const int32_t* num_keys, void* output,
                            const Sizes* sizes) {
    const auto call = [&](auto* typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        return choose<T>(*sizes, static_cast<const T*>(query), static_cast<const T*>(key_cache),
                         static_cast<const T*>(value_cache), block_table, table_row, num_keys,
                         static_cast<T*>(output));
    };
    return is_bfloat16 ? !call(static_cast<bfloat16*>(nullptr)) : !call(static_cast<float*>(nullptr));
}
