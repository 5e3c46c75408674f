/* Vectors as wide as the processor's registers, and functions on them. The library versions of these functions round
 * differently at different positions of an array.
 *
 * A vector is never wider than a register: GCC would keep it in memory, which makes the code nine times slower. Sums
 * always use sixteen lanes, in one or more vectors, and one fixed reduction tree. So a result depends only on the data,
 * not on the position in a batch or on the width of the processor's registers.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#ifndef LANES /* floats in a register of AVX-512, of AVX, and of others such as NEON */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#define WIDE 16 /* lanes over which a sum runs */
#define PARTS (WIDE / LANES)
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define FOR_PARTS UNROLL for (int p = 0; p < PARTS; p++)

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec_in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t word __attribute__((vector_size(4 * LANES)));
typedef uint32_t word_in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t half_in_memory __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t quarter_in_memory __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vec splat(float x) { return x - (vec){0}; } /* x + 0 would lose the sign of -0 */
INLINE vec load(const float *p) { return *(const vec_in_memory *)p; }
INLINE void store(float *p, vec x) { *(vec_in_memory *)p = x; }
INLINE word load_words(const void *p) { return *(const word_in_memory *)p; }
INLINE vec blend(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }
INLINE vec larger(vec a, vec b) { return blend(a > b, a, b); }

/* Return x, and prevent the compiler from fusing the product that computes x with a later sum or difference. Without
 * this, it may fuse either product of a b - c d. */
INLINE vec round_now(vec x)
{
#ifdef __aarch64__
    __asm__("" : "+w"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#endif
    return x;
}

/* first, first + 1, ... */
INLINE ivec count_from(int64_t first)
{
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const ivec_in_memory *)numbers + (int32_t)first;
}

/* Load the first `count` floats of a vector, and fill the other lanes with `rest`. */
INLINE vec load_first(const float *p, int64_t count, float rest)
{
    if (count >= LANES) return load(p);
    float copy[LANES];
    for (int i = 0; i < LANES; i++) copy[i] = i < count ? p[i] : rest;
    return load(copy);
}

/* Store the first `count` lanes of x. */
INLINE void store_first(float *p, vec x, int64_t count)
{
    if (count >= LANES) { store(p, x); return; }
    float copy[LANES];
    store(copy, x);
    for (int i = 0; i < count; i++) p[i] = copy[i];
}

/* bfloat16 is the upper half of a float. */
INLINE vec widen(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const half_in_memory *)p, word) << 16); }

INLINE uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1); /* may carry the bits of a NaN into its sign */
    return (uint16_t)(((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) >> 16);
}

INLINE vec widen_bytes(const int8_t *p)
{
#if LANES == 16 && defined(__AVX512F__) /* compilers convert the general form byte by byte */
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(*(const quarter_in_memory *)p, vec);
#endif
}

/* WIDE lanes, in as many vectors as they need. */
struct lanes {
    vec part[PARTS];
};

INLINE struct lanes splat_lanes(float x)
{
    struct lanes all;
    FOR_PARTS all.part[p] = splat(x);
    return all;
}

/* The first `count` of sixteen floats, then `rest`. */
INLINE struct lanes load_lanes(const float *x, int64_t count, float rest)
{
    struct lanes all;
    if (count >= WIDE) FOR_PARTS all.part[p] = load(x + p * LANES);
    else FOR_PARTS all.part[p] = load_first(x + p * LANES, count - p * LANES, rest);
    return all;
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE_BOTH(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE_BOTH(x, y, ...) __builtin_shuffle(x, y, (ivec){__VA_ARGS__})
#endif
#define SHUFFLE(x, ...) SHUFFLE_BOTH(x, x, __VA_ARGS__)
#if LANES == 16
#define WITHIN(x, JOIN)                                                                       \
    x = JOIN(x, SHUFFLE(x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));            \
    x = JOIN(x, SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));            \
    x = JOIN(x, SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));            \
    x = JOIN(x, SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif LANES == 8
#define WITHIN(x, JOIN)                                \
    x = JOIN(x, SHUFFLE(x, 4, 5, 6, 7, 0, 1, 2, 3));   \
    x = JOIN(x, SHUFFLE(x, 2, 3, 0, 1, 6, 7, 4, 5));   \
    x = JOIN(x, SHUFFLE(x, 1, 0, 3, 2, 5, 4, 7, 6));
#else
#define WITHIN(x, JOIN)                    \
    x = JOIN(x, SHUFFLE(x, 2, 3, 0, 1));   \
    x = JOIN(x, SHUFFLE(x, 1, 0, 3, 2));
#endif
/* Combine lanes that are eight apart, then four, two and one. */
#define ACROSS(all, JOIN)                                                                        \
    UNROLL for (int apart = PARTS / 2; apart; apart /= 2)                       \
        UNROLL for (int p = 0; p < apart; p++)                                  \
            all.part[p] = JOIN(all.part[p], all.part[p + apart]);                                \
    WITHIN(all.part[0], JOIN)

INLINE vec added(vec a, vec b) { return a + b; }

INLINE float sum(struct lanes all)
{
    ACROSS(all, added)
    return all.part[0][0];
}

INLINE float maximum(struct lanes all)
{
    ACROSS(all, larger)
    return all.part[0][0];
}

/* exp(x) within 2 units in the last place. The result is 0 below x = -87.3, where float32 becomes subnormal, and at
 * most exp(88). With x = n ln 2 + r and |r| <= 0.35, the function computes exp(r) with the Taylor polynomial of degree 6
 * and adds n to the exponent. NaN stays NaN. */
INLINE vec exponential(vec x)
{
    vec bounded = blend(x > splat(88.0f), splat(88.0f), x);
    vec shifted = bounded * splat(1.44269504f) + splat(12582912.0f); /* rounds to the nearest integer */
    vec n = shifted - splat(12582912.0f);
    vec r = n * splat(-0.693359375f) + bounded;
    r = n * splat(2.12194440e-4f) + r;
    vec p = splat(1.3888889e-3f);
    p = p * r + splat(8.3333333e-3f);
    p = p * r + splat(4.1666667e-2f);
    p = p * r + splat(1.6666667e-1f);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    ivec exponent = ((ivec)shifted - (ivec)splat(12582912.0f) + 127) << 23;
    return blend(bounded < splat(-87.33654f), splat(0.0f), p * (vec)exponent);
}

INLINE vec silu(vec x) { return x / (splat(1.0f) + exponential(-x)); }
