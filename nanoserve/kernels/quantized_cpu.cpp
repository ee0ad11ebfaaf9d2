// How does a CPU multiply by a quantized weight as fast as it reads it?
//
// quantized_cpu.py compiles this file as native_cpu.py does its own, and calls it. A decode reads
// every weight once, so its time is that of the bytes: the codes are decoded in registers, on their
// way to the product, and the numbers that they stand for are never written to memory.
//
// 64 outputs lie together (a panel), input after input, so that a vector holds the codes of 16
// outputs for one input. Up to four tokens share what is decoded:
//
//     panel    input 0: 64 codes | input 1: 64 codes | ...         one vector: 16 outputs
//     part[token][output] += x[token][input] * decoded[output]     until a group of inputs ends
//     total[token][output] += scale[output] * part - offset[output] * sum of the group's x
//
// Left out: products of integers (both sides quantized).
//
// vLLM: csrc/cpu/cpu_wna16.cpp, csrc/quantization/.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;            // numbers of a vector
constexpr int VECTORS = 4;           // of a panel
constexpr int PANEL = LANES * VECTORS;
constexpr int64_t SMALL_WORK = 1 << 15; // numbers; less is done by one core, at once
enum { INT4, INT8, FP8 };
#if defined(__AVX512F__)
constexpr int ROWS = 4;  // tokens at once: so many sums stay in registers
#else
constexpr int ROWS = 1;
#endif

typedef float floats __attribute__((vector_size(LANES * sizeof(float))));

struct Sizes {  // of one call
    int num_rows, num_inputs, num_outputs, num_groups;
};

inline floats load(const float* from) {
    floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

// The 64 numbers of a panel for one input. An fp8 (e4m3) number has the bits of a float32 but for
// its exponent, which is smaller by 120: also its smallest numbers, below 2^-6, are right then.
#if defined(__AVX512F__)
template <int KIND>
inline void decode(const uint8_t* codes, floats* numbers) {
    const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    for (int v = 0; v < (KIND == INT4 ? VECTORS / 2 : VECTORS); v++) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + v);
        if (KIND == INT8) {
            numbers[v] = floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
        } else if (KIND == INT4) {  // of an index, the lower four bits count
            const __m512i index = _mm512_cvtepu8_epi32(bytes);
            numbers[v] = floats(_mm512_permutexvar_ps(index, table));
            numbers[v + 2] = floats(_mm512_permutexvar_ps(_mm512_srli_epi32(index, 4), table));
        } else {
            const __m512i wide = _mm512_slli_epi32(_mm512_cvtepi8_epi32(bytes), 20);  // sign, too
            const __m512i bits = _mm512_and_si512(wide, _mm512_set1_epi32(int(0x87F00000)));
            numbers[v] = floats(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f)));
        }
    }
}
#else
template <int KIND>
inline void decode(const uint8_t* codes, floats* numbers) {
    float decoded[PANEL];
#pragma omp simd
    for (int i = 0; i < PANEL; i++) {
        if (KIND == INT8) {
            decoded[i] = int8_t(codes[i]);
        } else if (KIND == INT4) {
            decoded[i] = (codes[i % (PANEL / 2)] >> (i < PANEL / 2 ? 0 : 4) & 15) - 8;
        } else {
            const uint32_t bits = uint32_t(codes[i] & 0x7F) << 20 | uint32_t(codes[i] & 0x80) << 24;
            float number;
            std::memcpy(&number, &bits, sizeof number);
            decoded[i] = number * 0x1p120f;
        }
    }
    std::memcpy(numbers, decoded, sizeof decoded);
}
#endif

// N rows of x by one panel: `width` outputs of it exist. sums: of each group of inputs of a row.
template <int KIND, int N>
void multiply_panel(const Sizes& s, const float* x, const float* sums, const uint8_t* codes,
                    const float* scales, const float* offsets, int width, float* output) {
    constexpr int BYTES = KIND == INT4 ? PANEL / 2 : PANEL;
    const int group_size = s.num_inputs / s.num_groups;
    floats total[N][VECTORS] = {};
    for (int group = 0; group < s.num_groups; group++) {
        floats part[N][VECTORS] = {};
        const float* inputs = x + size_t(group) * group_size;
        for (int i = 0; i < group_size; i++, codes += BYTES) {
            floats numbers[VECTORS];
            decode<KIND>(codes, numbers);
            for (int row = 0; row < N; row++)
                for (int v = 0; v < VECTORS; v++)
                    part[row][v] += inputs[size_t(row) * s.num_inputs + i] * numbers[v];
        }
        for (int row = 0; row < N; row++)
            for (int v = 0; v < VECTORS; v++) {
                const size_t at = size_t(group) * PANEL + v * LANES;
                total[row][v] += part[row][v] * load(scales + at);
                if (offsets != nullptr)
                    total[row][v] -= sums[row * s.num_groups + group] * load(offsets + at);
            }
    }
    for (int row = 0; row < N; row++)
        std::memcpy(output + size_t(row) * s.num_outputs, total[row], width * sizeof(float));
}

template <int KIND>
void multiply(const Sizes& s, const float* x, const uint8_t* codes, const float* scales,
              const float* offsets, float* output) {
    constexpr int BYTES = KIND == INT4 ? PANEL / 2 : PANEL;
    const int num_panels = (s.num_outputs + PANEL - 1) / PANEL;
    const int group_size = s.num_inputs / s.num_groups;
    std::vector<float> sums(offsets == nullptr ? 0 : size_t(s.num_rows) * s.num_groups);
    for (size_t i = 0; i < sums.size(); i++)
        for (int j = 0; j < group_size; j++) sums[i] += x[i * group_size + j];
#pragma omp parallel for schedule(static) \
    if (int64_t(s.num_rows) * s.num_inputs * s.num_outputs > SMALL_WORK)
    for (int panel = 0; panel < num_panels; panel++) {
        const uint8_t* its_codes = codes + size_t(panel) * s.num_inputs * BYTES;
        const size_t at = size_t(panel) * s.num_groups * PANEL;
        const float* its_offsets = offsets == nullptr ? nullptr : offsets + at;
        const int width = std::min(PANEL, s.num_outputs - panel * PANEL);
        for (int row = 0, number; row < s.num_rows; row += number) {
            number = std::min(ROWS, s.num_rows - row);
            const float* its_x = x + size_t(row) * s.num_inputs;
            const float* its_sums = sums.data() + size_t(row) * s.num_groups;
            float* its_output = output + size_t(row) * s.num_outputs + panel * PANEL;
            auto run = number == 1   ? multiply_panel<KIND, 1>
                       : number == 2 ? multiply_panel<KIND, 2>
                       : number == 3 ? multiply_panel<KIND, 3>
                                     : multiply_panel<KIND, 4>;
            run(s, its_x, its_sums, its_codes, scales + at, its_offsets, width, its_output);
        }
    }
}

}  // namespace

// What Python calls. x [num_rows, num_inputs]; output [num_rows, num_outputs]; codes [panels,
// num_inputs, 64 bytes, or 32 with INT4: output i in the lower half of a byte, i + 32 in the
// upper]; scales and offsets (or null) [panels, num_groups, 64].
extern "C" const char* quantized_multiply(int num_rows, int num_inputs, int num_outputs,
                                          int num_groups, int kind, const float* x,
                                          const uint8_t* codes, const float* scales,
                                          const float* offsets, float* output) {
    auto run = kind == INT4 ? multiply<INT4> : kind == INT8 ? multiply<INT8> : multiply<FP8>;
    run({num_rows, num_inputs, num_outputs, num_groups}, x, codes, scales, offsets, output);
    return nullptr;
}
