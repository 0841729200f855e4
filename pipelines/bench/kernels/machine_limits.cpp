// What the hardware allows, all threads together: `machine_limits read | float32 | bfloat16 | int8 | bfloat16-amx |
// int8-amx` prints one number, 0 where the processor lacks the instructions. read: GB/s of memory that is read once, in
// blocks, by every thread from its own part. The others: arithmetic in registers, without memory, in 10^9 operations a
// second; a multiplication with addition counts as two. Tiles are configured by hand, so that a hidden CPUID leaf 0x1D
// does not matter.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <omp.h>
#include <string>
#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int REPEATS = 15;
#ifdef __AVX512F__
constexpr int VECTOR_BYTES = 64;
#else
constexpr int VECTOR_BYTES = 32;
#endif
typedef int64_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
constexpr int LANES = VECTOR_BYTES / sizeof(float);

// The shortest of several times, in seconds.
template <class Work> double fastest(Work work) {
    double best = 1e30;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double started = omp_get_wtime();
        work();
        best = std::min(best, omp_get_wtime() - started);
    }
    return best;
}

double read_gb_per_s() {
    constexpr size_t SIZE = (size_t)2 << 30, STEP = 8 * VECTOR_BYTES;
    char* memory = (char*)std::aligned_alloc(1 << 21, SIZE);
#pragma omp parallel for
    for (size_t at = 0; at < SIZE; at += 4096) std::memset(memory + at, 1, 4096);
    int64_t used = 0;
    double seconds = fastest([&] {
#pragma omp parallel reduction(+ : used)
        {
            Words sums[8] = {};
#pragma omp for schedule(static)
            for (size_t at = 0; at < SIZE; at += STEP)
                for (int i = 0; i < 8; i++) {
                    const char* from = memory + at + i * VECTOR_BYTES;
                    __builtin_prefetch(from + 4096);
                    sums[i] += *(const Words*)from;
                }
            for (auto& sum : sums) used += sum[0];
        }
    });
    return used ? SIZE / seconds / 1e9 : 0;
}

// Repeats step(sum) with 12 sums, which is more than any latency.
template <class Vector, class Step> double vector_gop_per_s(int operations, Step step) {
    constexpr int CHAINS = 12, STEPS = 10000000;
    double seconds = fastest([&] {
#pragma omp parallel
        {
            Vector sums[CHAINS] = {};
            for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 12  // so that the sums stay in registers
                for (int chain = 0; chain < CHAINS; chain++) {
                    sums[chain] = step(sums[chain]);
                    asm volatile("" : "+v"(sums[chain]));  // so that every step is computed, and not once for all chains
                }
            }
        }
    });
    return 1. * operations * CHAINS * STEPS * omp_get_max_threads() / seconds / 1e9;
}

double float32_gop_per_s() {
    Floats factor = Floats{} + .999f;
    return vector_gop_per_s<Floats>(2 * LANES, [=](Floats sum) { return sum * factor + factor; });
}
double bfloat16_gop_per_s() {
#ifdef __AVX512BF16__
    __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    return vector_gop_per_s<__m512>(64, [=](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); });
#else
    return 0;
#endif
}
double int8_gop_per_s() {
#ifdef __AVX512VNNI__
    __m512i ones = _mm512_set1_epi8(1);
    return vector_gop_per_s<__m512i>(128, [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, ones, ones); });
#else
    return 0;
#endif
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
struct __attribute__((packed)) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

double amx_gop_per_s(bool is_int8) {
    constexpr int STEPS = 4000000, PRODUCTS = 4;
    syscall(SYS_arch_prctl, 0x1023, 18);  // asks the kernel for tile data
    double seconds = fastest([&] {
#pragma omp parallel
        {
            TileConfig config;
            for (int tile = 0; tile < 8; tile++) config.rows[tile] = 16, config.bytes[tile] = 64;
            _tile_loadconfig(&config);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            _tile_zero(4);
            _tile_zero(5);
            for (int step = 0; step < STEPS; step++)
                if (is_int8) {
                    _tile_dpbssd(0, 4, 5);
                    _tile_dpbssd(1, 4, 5);
                    _tile_dpbssd(2, 4, 5);
                    _tile_dpbssd(3, 4, 5);
                } else {
                    _tile_dpbf16ps(0, 4, 5);
                    _tile_dpbf16ps(1, 4, 5);
                    _tile_dpbf16ps(2, 4, 5);
                    _tile_dpbf16ps(3, 4, 5);
                }
            _tile_release();
        }
    });
    double operations = 2. * 16 * 16 * (is_int8 ? 64 : 32);
    return operations * PRODUCTS * STEPS * omp_get_max_threads() / seconds / 1e9;
}
#else
double amx_gop_per_s(bool) { return 0; }
#endif

}  // namespace

int main(int, char** arguments) {
    std::string what = arguments[1];
    double measured = what == "read"       ? read_gb_per_s()
                      : what == "float32"  ? float32_gop_per_s()
                      : what == "bfloat16" ? bfloat16_gop_per_s()
                      : what == "int8"     ? int8_gop_per_s()
                                           : amx_gop_per_s(what == "int8-amx");
    std::printf("%.1f\n", measured);
}
