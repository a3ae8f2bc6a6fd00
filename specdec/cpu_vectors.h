// Registers of 16 floats, and how float32 and bfloat16 get in and out of them: what the C++ of specdec/cpu_attention.cpp
// and specdec/cpu_linear.cpp has in common. specdec/own_cpp.py puts it before them, for torch keeps by one source text.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

constexpr int64_t LANES = 16, PAIR = 2 * LANES;

static inline Vec load(const float *p) { return *(const Vec *)p; }
static inline Vec load(const uint16_t *p) { return (Vec)(__builtin_convertvector(*(const Halves *)p, Words) << 16); }

static inline Words rounded(Vec x) { // to bfloat16 in the upper half, to nearest, ties to even
    const Words bits = (Words)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}
static inline void store(float *p, Vec x) { *(Vec *)p = x; }
static inline void store(uint16_t *p, Vec x) { *(Halves *)p = __builtin_convertvector(rounded(x) >> 16, Halves); }

// Two registers of PAIR values: in float32 in order; in bfloat16 the even and the odd ones, of which a word holds one
// each.
static inline void load_pair(const float *p, Vec &a, Vec &b) { a = load(p), b = load(p + LANES); }
static inline void load_pair(const uint16_t *p, Vec &a, Vec &b) {
    const Words both = *(const Words *)p;
    a = (Vec)(both << 16), b = (Vec)(both & 0xffff0000u);
}
static inline void store_pair(float *p, Vec a, Vec b) { store(p, a), store(p + LANES, b); }
static inline void store_pair(uint16_t *p, Vec a, Vec b) { *(Words *)p = rounded(a) >> 16 | (rounded(b) & 0xffff0000u); }
