// How does a CPU multiply a few rows by a weight as fast as it reads the weight?
//
// output = x weight^T + bias, in float32, or in bfloat16 where the processor multiplies in it. The
// weight lies in panels of PANEL outputs, as linear_cpu.py packs it:
//
//     weight [outputs, inputs]  ->  [outputs / PANEL, inputs / PAIR, PANEL, PAIR]
//
//     four vectors of a panel     w[k] = 64 outputs, with AVX-512
//     for each of 6 rows          sums[row] += x[row][k] * w[k]        24 vectors, in registers
//
// So each number of the weight is read once, in the order in which it lies, for 6 rows; then again,
// from the core's cache, for the next 6. PAIR is 2 in bfloat16: one instruction multiplies two
// neighbouring numbers of a row by those of each lane, and adds both products in float32.
//
// A row's sum is made in the same order whatever rows are beside it: they do not change its bits.
//
// vLLM: csrc/cpu/sgl-kernels/gemm.cpp.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, VECTORS = 4;  // numbers of a vector; vectors of a panel
#else
constexpr int LANES = 8, VECTORS = 2;
#endif
constexpr int PANEL = VECTORS * LANES;  // outputs
constexpr int ROWS = 6;                 // whose sums are in registers together
constexpr int MOST_ROWS = 20 * ROWS;    // of a task; their sums stay in the first cache of a core
constexpr int MOST_INPUTS = 1024;       // of a panel at a time, which stay in the second
constexpr int AHEAD = 2048;             // bytes of the panel that are fetched before their use
constexpr int SMALL_WORK = 1 << 17;     // products of numbers; fewer are made by one core, at once

typedef float Vector __attribute__((vector_size(4 * LANES), may_alias));

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline void add_product(Vector& sum, const float* x, const Vector* w) { sum += *x * *w; }
inline void store(Vector x, float* to) { std::memcpy(to, &x, sizeof x); }

#ifdef __AVX512BF16__
inline float to_float(bfloat16 x) {  // the upper half of a float32
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void add_product(Vector& sum, const bfloat16* x, const Vector* w) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)*w);
}

inline void store(Vector x, bfloat16* to) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &rounded, sizeof rounded);
}
#endif

// Add the products of `number` rows with `inputs` of a panel to their sums. There is a function for
// each NUMBER up to ROWS, because registers hold the sums of a number that the compiler knows.
template <typename T, int NUMBER = ROWS>
void multiply_rows(int number, int inputs, size_t stride, const T* x, const T* panel,
                   Vector* sums) {
    if constexpr (NUMBER > 1)
        if (number < NUMBER)
            return multiply_rows<T, NUMBER - 1>(number, inputs, stride, x, panel, sums);
    constexpr int PAIR = sizeof(float) / sizeof(T);
    Vector a[NUMBER][VECTORS];
    std::memcpy(a, sums, sizeof a);
    for (int k = 0; k < inputs; k += PAIR, panel += PANEL * PAIR) {
        const Vector* w = reinterpret_cast<const Vector*>(panel);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++)
            __builtin_prefetch(reinterpret_cast<const char*>(w + i) + AHEAD);
#pragma GCC unroll 6
        for (int row = 0; row < NUMBER; row++)
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) add_product(a[row][i], x + row * stride + k, w + i);
    }
    std::memcpy(sums, a, sizeof a);
}

template <typename T>
void multiply(int num_rows, int inputs, int outputs, const T* x, const T* weight, const T* bias,
              T* output) {
    const int panels = (outputs + PANEL - 1) / PANEL;
    const int chunks = (num_rows + MOST_ROWS - 1) / MOST_ROWS;  // tasks of a panel
#pragma omp parallel for collapse(2) schedule(dynamic) \
    if (int64_t(num_rows) * inputs * outputs > SMALL_WORK)
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int p = 0; p < panels; p++) {
            const int begin = int64_t(num_rows) * chunk / chunks;
            const int number = int64_t(num_rows) * (chunk + 1) / chunks - begin;
            const int first = p * PANEL, width = std::min(PANEL, outputs - first);
            Vector sums[MOST_ROWS * VECTORS], start[VECTORS] = {};
            for (int i = 0; bias != nullptr && i < width; i++)
                start[i / LANES][i % LANES] = to_float(bias[first + i]);
            for (int row = 0; row < number; row++)
                std::copy(start, start + VECTORS, sums + row * VECTORS);
            const T* panel = weight + size_t(first) * inputs;
            const int passes = (number + ROWS - 1) / ROWS;
            for (int k = 0; k < inputs; k += MOST_INPUTS)
                for (int i = 0; i < passes; i++) {
                    const int row = number * i / passes, end = number * (i + 1) / passes;
                    multiply_rows(end - row, std::min(MOST_INPUTS, inputs - k), inputs,
                                  x + size_t(begin + row) * inputs + k, panel + size_t(k) * PANEL,
                                  sums + row * VECTORS);
                }
            for (int row = 0; row < number; row++) {
                T whole[PANEL], *to = output + size_t(begin + row) * outputs + first;
                for (int i = 0; i < VECTORS; i++)
                    store(sums[row * VECTORS + i], whole + i * LANES);
                std::copy(whole, whole + width, to);
            }
        }
}

}  // namespace

// What Python calls: x [num_rows, inputs], bias [outputs] or null, output [num_rows, outputs]. In
// bfloat16, inputs is even.
#define EXPORT(T, NAME)                                                                            \
    extern "C" const char* multiply_##NAME(int num_rows, int inputs, int outputs, const T* x,      \
                                           const T* weight, const T* bias, T* output) {            \
        multiply(num_rows, inputs, outputs, x, weight, bias, output);                              \
        return nullptr;                                                                            \
    }

EXPORT(float, f32)
#ifdef __AVX512BF16__
EXPORT(bfloat16, bf16)
#endif

extern "C" const int panel = PANEL;  // outputs
