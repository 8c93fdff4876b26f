/* RMS norm of rows, in one pass and with the roundings of the models' own modules.

Compiled on the machine that runs it, for one dtype: see cpu_modules.py. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t Element;
static inline float widen(Element x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
static inline Element narrow(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
typedef float Element;
static inline float widen(Element x) { return x; }
static inline Element narrow(float x) { return x; }
#endif

/* Rows (rows, size), one after the other; with `residual` they are added to it first, and the sum is normed before it is
   rounded, as vLLM does. With `one_added` the scale is 1 + weight, as Gemma has it, and is rounded once, with the product;
   without, the normed row is rounded before it is scaled, as Llama has it. */
void rms_norm(const Element *inputs, Element *residual, const Element *weight, Element *outputs, int64_t rows, int64_t size,
              float epsilon, int one_added, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows >= 8 * threads)
    for (int64_t r = 0; r < rows; r++) {
        const Element *in = inputs + r * size;
        Element *out = outputs + r * size;
        float row[size], squares = 0;
        for (int64_t i = 0; i < size; i++) row[i] = widen(in[i]);
        if (residual != NULL)
            for (int64_t i = 0; i < size; i++) {
                row[i] += widen(residual[r * size + i]);
                residual[r * size + i] = narrow(row[i]);
            }
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; i++) squares += row[i] * row[i];
        float scale = 1.0f / sqrtf(squares / size + epsilon);
        if (one_added)
            for (int64_t i = 0; i < size; i++) out[i] = narrow(row[i] * scale * (1.0f + widen(weight[i])));
        else
            for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(narrow(row[i] * scale)) * widen(weight[i]));
    }
}
