/* Attention of the last token of every sequence of a batch, each over its own keys, in one call.

Compiled on the machine that runs it, for one shape: see generation.py. Only GCC's vector extensions are used, which
clang knows too, so that any processor's own vector instructions serve.

Shapes: R sequences, H KV heads, G query heads of a KV head, D head size. */

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if HEAD_SIZE % 16 == 0
#define WIDTH 16
#elif HEAD_SIZE % 8 == 0
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define VECTORS (HEAD_SIZE / WIDTH)
#define AHEAD 1024 /* elements that are fetched before they are needed */
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

#ifdef BFLOAT16
typedef uint16_t Element;
static inline Floats load(const Element *from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}
static inline void store(Element *to, Floats x) { /* rounded to the nearest, ties to even */
    Words bits = (Words)x;
    Halves halves = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
    memcpy(to, &halves, sizeof halves);
}
#else
typedef float Element;
static inline Floats load(const Element *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}
static inline void store(Element *to, Floats x) { memcpy(to, &x, sizeof x); }
#endif

static inline float add_up(Floats x) {
    typedef float Four __attribute__((vector_size(16)));
    Four four[WIDTH / 4];
    memcpy(four, &x, sizeof x);
#if WIDTH == 16
    four[0] += four[2];
    four[1] += four[3];
#endif
#if WIDTH >= 8
    four[0] += four[1];
#endif
    return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

static inline Floats larger(Floats a, Floats b) {
    Ints first = a > b;
    return (Floats)(((Ints)a & first) | ((Ints)b & ~first));
}

/* e to the power of x <= 0, to 2e-7 relative: 2 to the power of its rounded base-2 logarithm, times a series of the rest. */
static inline Floats exponential(Floats x) {
    Floats power = larger(x, (Floats){0} - 87.0f) * 1.44269504f;
    Ints whole = __builtin_convertvector(power - 0.5f, Ints);
    Floats rest = power - __builtin_convertvector(whole, Floats);
    Floats series = rest * 1.5403530e-4f + 1.3333558e-3f;
    series = series * rest + 9.6181291e-3f;
    series = series * rest + 5.5504109e-2f;
    series = series * rest + 2.4022651e-1f;
    series = series * rest + 6.9314718e-1f;
    series = series * rest + 1.0f;
    return series * (Floats)((whole + 127) << 23);
}

/* cap * tanh(x / cap). */
static inline Floats soften(Floats x, float cap) {
    Ints sign = (Ints)x & INT32_MIN;
    Floats small = exponential((Floats)((Ints)x | INT32_MIN) * (2.0f / cap));
    Floats size = cap * (1.0f - small) / (1.0f + small);
    return (Floats)((Ints)size | sign);
}

/* The G queries of one KV head over `tokens` keys, and their sinks or NULL; `weights` has room for G rows of `room` numbers, whole vectors. */
static void attend_head(const Element *q, int64_t q_head, const Element *k, const Element *v, int64_t tokens, float scaling,
                        float softcap, const float *sinks, Element *out, float *weights, int64_t room) {
    Floats queries[GROUPS][VECTORS], sums[GROUPS][VECTORS];
    UNROLL for (int g = 0; g < GROUPS; g++) UNROLL for (int c = 0; c < VECTORS; c++)
        queries[g][c] = load(q + g * q_head + WIDTH * c) * scaling;
    for (int64_t i = 0; i < tokens; i++) {
        Floats products[GROUPS];
        __builtin_prefetch(k + i * HEAD_SIZE + AHEAD);
        __builtin_prefetch(k + i * HEAD_SIZE + AHEAD + HEAD_SIZE / 2);
        UNROLL for (int c = 0; c < VECTORS; c++) {
            Floats key = load(k + i * HEAD_SIZE + WIDTH * c);
            UNROLL for (int g = 0; g < GROUPS; g++)
                products[g] = c ? products[g] + key * queries[g][c] : key * queries[g][c];
        }
        UNROLL for (int g = 0; g < GROUPS; g++) weights[g * room + i] = add_up(products[g]);
    }
    for (int g = 0; g < GROUPS; g++) {
        float *row = weights + g * room;
        Floats most = (Floats){0} - 3e38f, total = {0}, x;
        if (softcap > 0)
            for (int64_t i = 0; i < room; i += WIDTH) {
                memcpy(&x, row + i, sizeof x);
                x = soften(x, softcap);
                memcpy(row + i, &x, sizeof x);
            }
        for (int64_t i = tokens; i < room; i++) row[i] = -3e38f;
        for (int64_t i = 0; i < room; i += WIDTH) {
            memcpy(&x, row + i, sizeof x);
            most = larger(most, x);
        }
        float largest = most[0];
        for (int j = 1; j < WIDTH; j++) largest = most[j] > largest ? most[j] : largest;
        if (sinks != NULL && sinks[g] > largest) largest = sinks[g];
        for (int64_t i = 0; i < room; i += WIDTH) {
            memcpy(&x, row + i, sizeof x);
            x = exponential(x - largest);
            total += x;
            memcpy(row + i, &x, sizeof x);
        }
        float of_sink = sinks == NULL ? 0.0f : exponential((Floats){0} + (sinks[g] - largest))[0];
        float part = 1.0f / (add_up(total) + of_sink);
        for (int64_t i = 0; i < tokens; i++) row[i] *= part;
    }
    UNROLL for (int g = 0; g < GROUPS; g++) UNROLL for (int c = 0; c < VECTORS; c++) sums[g][c] = (Floats){0};
    for (int64_t i = 0; i < tokens; i++) {
        __builtin_prefetch(v + i * HEAD_SIZE + AHEAD);
        __builtin_prefetch(v + i * HEAD_SIZE + AHEAD + HEAD_SIZE / 2);
        UNROLL for (int c = 0; c < VECTORS; c++) {
            Floats value = load(v + i * HEAD_SIZE + WIDTH * c);
            UNROLL for (int g = 0; g < GROUPS; g++) sums[g][c] += value * weights[g * room + i];
        }
    }
    UNROLL for (int g = 0; g < GROUPS; g++) UNROLL for (int c = 0; c < VECTORS; c++)
        store(out + g * HEAD_SIZE + WIDTH * c, sums[g][c]);
}

/* One sequence: where its keys and values are, elements from one KV head's to the next's, the first position that is seen,
   and the next free one, where the new key and value go. */
typedef struct {
    Element *k, *v;
    int64_t head, first, used;
} Sequence;

/* New rows: elements from one sequence's to the next's, and from one head's to the next's. */
typedef struct {
    const Element *at;
    int64_t row, head;
} New;

/* Appends every sequence's key and value and writes its output, (R, H x G, D). `sinks` are (H x G) scores of no key, or NULL. Returns 0, or 1 where memory is short. */
int decode_attention(const New *q, const New *k, const New *v, const Sequence *sequences, int count, int kv_heads, float scaling,
                     float softcap, const float *sinks, int threads, Element *out) {
    int64_t room = 0;
    for (int r = 0; r < count; r++) {
        int64_t tokens = sequences[r].used + 1 - sequences[r].first;
        if (tokens > room) room = tokens;
    }
    room = (room + WIDTH - 1) / WIDTH * WIDTH;
    float *weights = malloc(sizeof(float) * room * GROUPS * threads);
    if (weights == NULL) return 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int task = 0; task < count * kv_heads; task++) {
        int r = task / kv_heads, h = task % kv_heads;
        Sequence one = sequences[r];
        Element *keys = one.k + h * one.head, *values = one.v + h * one.head;
        memcpy(keys + one.used * HEAD_SIZE, k->at + r * k->row + h * k->head, HEAD_SIZE * sizeof(Element));
        memcpy(values + one.used * HEAD_SIZE, v->at + r * v->row + h * v->head, HEAD_SIZE * sizeof(Element));
        int64_t tokens = one.used + 1 - one.first;
        attend_head(q->at + r * q->row + h * GROUPS * q->head, q->head, keys + one.first * HEAD_SIZE,
                    values + one.first * HEAD_SIZE, tokens, scaling, softcap,
                    sinks == NULL ? NULL : sinks + h * GROUPS, out + task * GROUPS * (int64_t)HEAD_SIZE,
                    weights + omp_get_thread_num() * GROUPS * room, (tokens + WIDTH - 1) / WIDTH * WIDTH);
    }
    free(weights);
    return 0;
}
