/* Vectors of sixteen floats, and functions on them whose library versions round differently by position.
 *
 * The vector extensions of GCC and Clang compile to one AVX-512 register, two of AVX2 or four of NEON. Sums always
 * use sixteen lanes and one fixed reduction tree, so a result depends only on the data, not on the position in a
 * batch or the width of the processor's registers.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef float v16_in_memory __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint16_t u16_half __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t u16_word __attribute__((vector_size(64)));
typedef int8_t i8_quarter __attribute__((vector_size(16), aligned(1), may_alias));

static const i16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16 load(const float *p) { return *(const v16_in_memory *)p; }
INLINE void store(float *p, v16 x) { *(v16_in_memory *)p = x; }
INLINE v16 blend(i16 mask, v16 yes, v16 no) { return (v16)((mask & (i16)yes) | (~mask & (i16)no)); }
INLINE v16 larger(v16 a, v16 b) { return blend(a > b, a, b); }

INLINE v16 load_first(const float *p, long count, float rest)
{
    if (count >= LANES) return load(p);
    float copy[LANES];
    for (int i = 0; i < LANES; i++) copy[i] = i < count ? p[i] : rest;
    return load(copy);
}

INLINE void store_first(float *p, v16 x, long count)
{
    if (count >= LANES) { store(p, x); return; }
    float copy[LANES];
    store(copy, x);
    memcpy(p, copy, count * sizeof(float));
}

/* bfloat16 is the upper half of a float. */
INLINE v16 widen(const uint16_t *p)
{
    return (v16)(__builtin_convertvector(*(const u16_half *)p, u16_word) << 16);
}

INLINE uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE v16 widen_bytes(const int8_t *p)
{
#ifdef __AVX512F__ /* compilers convert the general form byte by byte */
    return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    return __builtin_convertvector(*(const i8_quarter *)p, v16);
#endif
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE_BOTH(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE_BOTH(x, y, ...) __builtin_shuffle(x, y, (i16){__VA_ARGS__})
#endif
#define SHUFFLE(x, ...) SHUFFLE_BOTH(x, x, __VA_ARGS__)
#define ACROSS(x, JOIN)                                                                       \
    x = JOIN(x, SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));            \
    x = JOIN(x, SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));            \
    x = JOIN(x, SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));            \
    x = JOIN(x, SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));

INLINE v16 added(v16 a, v16 b) { return a + b; }

INLINE float sum(v16 x)
{
    ACROSS(x, added)
    return x[0];
}

INLINE float maximum(v16 x)
{
    ACROSS(x, larger)
    return x[0];
}

/* exp(x) within 2 units in the last place; 0 below -87.3, where float32 becomes subnormal, and at most exp(88).
 * x = n ln 2 + r: exp(r) is the Taylor polynomial of degree 6 (|r| <= 0.35), and 2^n sets the exponent. NaN stays
 * NaN. */
INLINE v16 exponential(v16 x)
{
    v16 bounded = blend(x > splat(88.0f), splat(88.0f), x);
    v16 shifted = bounded * splat(1.44269504f) + splat(12582912.0f); /* rounds to the nearest integer */
    v16 n = shifted - splat(12582912.0f);
    v16 r = n * splat(-0.693359375f) + bounded;
    r = n * splat(2.12194440e-4f) + r;
    v16 p = splat(1.3888889e-3f);
    p = p * r + splat(8.3333333e-3f);
    p = p * r + splat(4.1666667e-2f);
    p = p * r + splat(1.6666667e-1f);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    i16 exponent = ((i16)shifted - (i16)splat(12582912.0f) + 127) << 23;
    return blend(bounded < splat(-87.33654f), splat(0.0f), p * (v16)exponent);
}

INLINE v16 silu(v16 x) { return x / (splat(1.0f) + exponential(-x)); }
