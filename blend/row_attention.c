/* Attention of chosen rows of a prompt, each over all keys up to its own position: in bfloat16 by the matrix instructions of AMX
   or AVX512-BF16's products of pairs, in float32 by any vector instructions; and the rotation of the keys.

Compiled on the machine that runs it, for one head size and dtype: see attention.py. Keys, and in bfloat16 values, are packed into
the order of the instructions once a call, some KV heads at a time. Then every thread takes QUERIES queries of one KV head at a
time through the keys that they see, KEYS at a time: scores, softmax with what the keys before have left (FlashAttention's), and
the sum of the values. In float32 only GCC's vector extensions are needed, which clang knows too.

Shapes: S rows, H KV heads, G query heads of a KV head, X = S x G queries of a KV head, N keys, D head size. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#ifdef AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if HEAD_SIZE % 32
#error "a product takes 32 numbers of a head"
#endif
#if defined __AVX512F__
#define WIDTH 16
#elif defined __AVX__
#define WIDTH 8
#else
#define WIDTH 4
#endif
#ifdef AMX
#define QUERIES 32 /* two tiles */
#else
#define QUERIES 48 /* a multiple of ROWS */
#endif
#define KEYS 256 /* so that a thread's scores stay in its first caches */
#define GROUP 32 /* keys that are packed together: two tiles of keys, or the depth of one of values */
#define SCORES (KEYS + 16) /* numbers from a row to the next; a power of two apart, rows would share places in the cache */
#define WEIGHTS (KEYS + 32)
#define PACKED (1 << 23) /* bytes that are packed at a time: memory that the C library keeps for the next call */
#define HIDDEN (-1e30f)
#define UNROLL _Pragma("GCC unroll 16")

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

static inline Floats all(float x) { return (Floats){0} + x; }

#ifdef __AVX512F__
static inline Floats larger_of(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline float largest_in(Floats x) { return _mm512_reduce_max_ps(x); }
static inline float sum_in(Floats x) { return _mm512_reduce_add_ps(x); }
#else
static inline Floats larger_of(Floats a, Floats b) {
    Ints first = a > b;
    return (Floats)(((Ints)a & first) | ((Ints)b & ~first));
}
static inline float largest_in(Floats x) {
    float largest = x[0];
    for (int i = 1; i < WIDTH; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}
static inline float sum_in(Floats x) {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i];
    return sum;
}
#endif

/* The parts that a dtype has of its own: a thread's memory, conversions and powers of two. */

#ifdef BFLOAT16

typedef uint16_t Element;
typedef struct {
    Element queries[QUERIES][HEAD_SIZE], weights[QUERIES][WEIGHTS];
    float scores[QUERIES][SCORES], sums[QUERIES][HEAD_SIZE], largest[QUERIES], total[QUERIES];
} Workspace;

static inline Element *weights_of(Workspace *work, int x) { return work->weights[x]; }

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

/* Two vectors, rounded. */
static inline void put(Element *to, Floats first, Floats second) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* 2 to the power of x <= 0, to 1e-4 relative: weights are rounded to 8 bits, 4e-3. */
static inline Floats power_of_two(Floats x) {
    Floats whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = x - whole;
    Floats series = rest * 5.592204e-2f + 2.4264008e-1f;
    series = series * rest + 6.9312103e-1f;
    series = series * rest + 9.9992448e-1f;
    return _mm512_scalef_ps(series, whole);
}

#else

typedef float Element;
typedef struct { /* weights stand where the scores stood */
    float queries[QUERIES][HEAD_SIZE], scores[QUERIES][SCORES], sums[QUERIES][HEAD_SIZE], largest[QUERIES], total[QUERIES];
} Workspace;

static inline Element *weights_of(Workspace *work, int x) { return work->scores[x]; }
static inline float widen(Element x) { return x; }
static inline Element narrow(float x) { return x; }

static inline void put(Element *to, Floats first, Floats second) {
    store(to, first);
    store(to + WIDTH, second);
}

/* 2 to the power of x <= 0, to 2e-7 relative; 0 below 2 to the power of -126, so that no product is slowed by tiny numbers. What
   is not a number stays so: of two, `larger_of` gives the second one then. */
static inline Floats power_of_two(Floats x) {
    x = larger_of(all(-127.0f), x);
    Ints whole = __builtin_convertvector(x - 0.5f, Ints);
    Floats rest = x - __builtin_convertvector(whole, Floats);
    Floats series = rest * 1.5403530e-4f + 1.3333558e-3f;
    series = series * rest + 9.6181291e-3f;
    series = series * rest + 5.5504109e-2f;
    series = series * rest + 2.4022651e-1f;
    series = series * rest + 6.9314718e-1f;
    series = series * rest + 1.0f;
    return series * (Floats)((whole + 127) << 23);
}

#endif

/* Packing. */

#ifdef BFLOAT16
#define PACKS_VALUES 1
typedef uint32_t Unit __attribute__((may_alias)); /* two numbers that are multiplied by two others, and added to a sum, at once */
#else
#define PACKS_VALUES 0
typedef float Unit;
#endif
#define NUMBERS ((int)(sizeof(Unit) / sizeof(Element)))

/* GROUP keys of a head, `count` of which there are: for each unit of D that of every key. */
static void pack_keys(const Element *keys, int64_t row, int count, Element *packed) {
    Unit *to = (Unit *)packed;
    for (int key = 0; key < GROUP; key++)
        for (int i = 0; i < HEAD_SIZE / NUMBERS; i++) {
            Unit x = 0;
            if (key < count) memcpy(&x, keys + key * row + i * NUMBERS, sizeof x);
            to[i * GROUP + key] = x;
        }
}

/* GROUP values of a head: for every two keys the pairs of their numbers. */
static void pack_values(const Element *values, int64_t row, int count, Element *packed) {
#ifdef BFLOAT16
    for (int key = 0; key < GROUP; key += 2) {
        Element none[HEAD_SIZE] = {0};
        const Element *first = key < count ? values + key * row : none;
        const Element *second = key + 1 < count ? values + (key + 1) * row : none;
        for (int i = 0; i < HEAD_SIZE; i++) ((Unit *)packed)[key / 2 * HEAD_SIZE + i] = first[i] | (Unit)second[i] << 16;
    }
#endif
}

/* The two products: of queries by keys, and of weights by values. */

#ifdef AMX

#define PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18

/* Tiles 0 to 3 are sums of products, of two tiles of rows (4, 5) by two of columns (6, 7). The compiler does not know that the
   instructions read memory. */
#define ZERO_SUMS _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3)
#define MOVE_SUMS(move, at, row) \
    IN_MEMORY; \
    move(0, at, row * sizeof(float)); \
    move(1, at + 16, row * sizeof(float)); \
    move(2, at + 16 * row, row * sizeof(float)); \
    move(3, at + 16 * row + 16, row * sizeof(float))
#define ADD_PRODUCTS _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7)
#define IN_MEMORY __asm__ volatile("" ::: "memory")

/* Asks the system for the tiles' registers, which a process may use only after that. Returns 0 where it may. */
int prepare(void) { return (int)syscall(SYS_arch_prctl, PERMISSION, TILE_DATA); }

static void begin_thread(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    IN_MEMORY;
    _tile_loadconfig(&config);
}

static void end_thread(void) { _tile_release(); }

/* Scores of the first queries, or all, over so many packed keys, whole groups. */
static void score(Workspace *work, int queries, const Element *keys, int count) {
    IN_MEMORY;
    for (int key = 0; key < count; key += GROUP) {
        const Unit *from = (const Unit *)(keys + key * HEAD_SIZE);
        float *to = &work->scores[0][key];
        ZERO_SUMS;
        for (int part = 0; part < HEAD_SIZE; part += 32, from += 16 * GROUP) {
            _tile_loadd(4, &work->queries[0][part], HEAD_SIZE * sizeof(Element));
            _tile_loadd(5, &work->queries[16][part], HEAD_SIZE * sizeof(Element));
            _tile_loadd(6, from, GROUP * sizeof(Unit));
            _tile_loadd(7, from + 16, GROUP * sizeof(Unit));
            ADD_PRODUCTS;
        }
        MOVE_SUMS(_tile_stored, to, SCORES);
    }
}

/* Adds the values of so many keys to the queries' sums, by their weights; see the other one below. */
static void add_values(Workspace *work, int queries, const Element *values, int64_t row, int count) {
    for (int part = 0; part < HEAD_SIZE; part += 32) {
        float *sums = &work->sums[0][part];
        MOVE_SUMS(_tile_loadd, sums, HEAD_SIZE);
        for (int key = 0; key < count; key += GROUP) {
            const Unit *from = (const Unit *)(values + key * row) + part;
            _tile_loadd(4, &work->weights[0][key], WEIGHTS * sizeof(Element));
            _tile_loadd(5, &work->weights[16][key], WEIGHTS * sizeof(Element));
            _tile_loadd(6, from, row * sizeof(Unit));
            _tile_loadd(7, from + 16, row * sizeof(Unit));
            ADD_PRODUCTS;
        }
        MOVE_SUMS(_tile_stored, sums, HEAD_SIZE);
    }
}

#else

#define ROWS (WIDTH == 16 ? 12 : 6) /* of a product: with two vectors each, as many sums as there are registers for */

int prepare(void) { return 0; }
static void begin_thread(void) {}
static void end_thread(void) {}

static inline Floats add_product(Floats sum, const Unit *columns, Unit x) {
#ifdef BFLOAT16
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(columns), (__m512bh)_mm512_set1_epi32((int)x));
#else
    return sum + load(columns) * x;
#endif
}

/* ROWS rows of a product of matrices, two vectors of each, in units: `a` is (ROWS, depth) and `b` (depth, 2 x WIDTH). */
static inline void multiply(const Unit *a, int64_t a_row, const Unit *b, int64_t b_row, int depth, float *out, int64_t out_row,
                            int adds) {
    Floats sums[ROWS][2];
    UNROLL for (int x = 0; x < ROWS; x++) UNROLL for (int j = 0; j < 2; j++)
        sums[x][j] = adds ? load(out + x * out_row + j * WIDTH) : all(0);
    for (int i = 0; i < depth; i++)
        UNROLL for (int x = 0; x < ROWS; x++) UNROLL for (int j = 0; j < 2; j++)
            sums[x][j] = add_product(sums[x][j], b + i * b_row + j * WIDTH, a[x * a_row + i]);
    UNROLL for (int x = 0; x < ROWS; x++) UNROLL for (int j = 0; j < 2; j++)
        store(out + x * out_row + j * WIDTH, sums[x][j]);
}

/* Scores of the first queries, or all, over so many packed keys, whole groups. */
static void score(Workspace *work, int queries, const Element *keys, int count) {
    for (int key = 0; key < count; key += 2 * WIDTH)
        for (int x = 0; x < queries; x += ROWS) {
            int units = HEAD_SIZE / NUMBERS;
            const Unit *columns = (const Unit *)(keys + key / GROUP * GROUP * HEAD_SIZE) + key % GROUP;
            multiply((const Unit *)work->queries[x], units, columns, GROUP, units, &work->scores[x][key], SCORES, 0);
        }
}

/* Adds the values of so many keys to the queries' sums, by their weights; `row` numbers are from a value's, or a pair's, to the
   next one's. */
static void add_values(Workspace *work, int queries, const Element *values, int64_t row, int count) {
    for (int part = 0; part < HEAD_SIZE; part += 2 * WIDTH)
        for (int x = 0; x < queries; x += ROWS) {
            int64_t weights_row = weights_of(work, 1) - weights_of(work, 0);
            multiply((const Unit *)weights_of(work, x), weights_row / NUMBERS, (const Unit *)values + part, row,
                     (count + NUMBERS - 1) / NUMBERS, &work->sums[x][part], HEAD_SIZE, 1);
        }
}

#endif

/* Rows that are read: elements from one row to the next, and from one head to the next. */
typedef struct {
    const Element *at;
    int64_t row, head;
} Rows;

/* Turns keys (heads, rows, D) in place, the first `half` numbers of each against the next; `cosines` and `sines` have
   `table_row` numbers a row. With `rounds_products` both products are rounded before they are added, as the models do: they wait
   in memory, so that no compiler takes product and sum in one instruction. Without, the second is added by such an instruction,
   as vLLM does. */
void rotate(Element *keys, int64_t head, int64_t row, int64_t heads, int64_t rows, const Element *cosines, const Element *sines,
            int64_t table_row, int64_t half, int rounds_products, int threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            Element *first = keys + h * head + r * row, *second = first + half;
            const Element *cosine = cosines + r * table_row, *sine = sines + r * table_row;
            if (rounds_products) {
                float products[4][HEAD_SIZE / 2];
                for (int64_t i = 0; i < half; i++) {
                    float a = widen(first[i]), b = widen(second[i]), c = widen(cosine[i]), s = widen(sine[i]);
                    products[0][i] = widen(narrow(a * c)), products[1][i] = widen(narrow(b * s));
                    products[2][i] = widen(narrow(b * c)), products[3][i] = widen(narrow(a * s));
                }
                for (int64_t i = 0; i < half; i++) {
                    first[i] = narrow(products[0][i] - products[1][i]);
                    second[i] = narrow(products[2][i] + products[3][i]);
                }
            } else
                for (int64_t i = 0; i < half; i++) {
                    float a = widen(first[i]), b = widen(second[i]), c = widen(cosine[i]), s = widen(sine[i]);
                    first[i] = narrow(fmaf(-b, s, a * c));
                    second[i] = narrow(fmaf(a, s, b * c));
                }
        }
}

/* cap * tanh(x / cap) of a row of scores, which come unscaled. */
static void soft_cap(float *row, int count, float scaling, float cap) {
    for (int i = 0; i < count; i += WIDTH) {
        Floats x = load(row + i);
        Ints sign = (Ints)x & INT32_MIN;
        Floats size = (Floats)((Ints)x | INT32_MIN) * (2.0f * 1.44269504f * scaling / cap);
        Floats small = power_of_two(larger_of(all(-126.0f), size));
        Floats tanh = (1.0f - small) / (1.0f + small);
        store(row + i, (Floats)((Ints)tanh | sign) * cap);
    }
}

/* Weights of query x over `count` keys, a multiple of GROUP, of which it sees those from `low` to before `high`. What its sums
   and total were for is scaled down where a score is larger than all before. */
static void weigh(Workspace *work, int x, int low, int high, int count, float scaling, float softcap) {
    float *row = work->scores[x];
    Element *weights = weights_of(work, x);
    if (low >= high) {
        memset(weights, 0, count * sizeof(Element));
        return;
    }
    if (softcap > 0) soft_cap(row, count, scaling, softcap), scaling = 1.0f;
    for (int i = 0; i < low; i++) row[i] = HIDDEN;
    for (int i = high; i < count; i++) row[i] = HIDDEN;
    Floats most = all(work->largest[x]), other = most, total = all(0);
    float factor = scaling * 1.44269504f;
    for (int i = 0; i < count; i += 2 * WIDTH) {
        most = larger_of(most, load(row + i));
        other = larger_of(other, load(row + i + WIDTH));
    }
    float largest = largest_in(larger_of(most, other));
    if (largest > work->largest[x]) {
        Floats down = power_of_two(all((work->largest[x] - largest) * factor));
        for (int i = 0; i < HEAD_SIZE; i += WIDTH) store(work->sums[x] + i, load(work->sums[x] + i) * down);
        work->total[x] *= down[0];
        work->largest[x] = largest;
    }
    for (int i = 0; i < count; i += 2 * WIDTH) {
        Floats first = power_of_two(load(row + i) * factor - largest * factor);
        Floats second = power_of_two(load(row + i + WIDTH) * factor - largest * factor);
        total += first + second;
        put(weights + i, first, second);
    }
    work->total[x] += sum_in(total);
}

/* The first position that a row sees: of `window` positions, its own the last; below 0, from a multiple of -window on. */
static int64_t first_seen(int64_t position, int64_t window) {
    return window < 0 ? position - position % -window : larger(0, position + 1 - window);
}

/* Adds up the weights of the queries from `from` to before `count`, each over the keys that it sees, once their largest scores and
   totals are known: of all of them in `sums`, of those from `of_last` on, the last row's, in the `keys_sum` numbers after. */
static void weigh_again(Workspace *work, const Element *keys, const int64_t *positions, int64_t x0, int from, int count, int of_last,
                        int64_t groups, int64_t window, float scaling, float softcap, float *sums, int64_t keys_sum) {
    float factor = 1.44269504f * (softcap > 0 ? 1.0f : scaling);
    int64_t first = first_seen(positions[(x0 + from) / groups], window), stop = positions[(x0 + count - 1) / groups] + 1;
    for (int64_t start = first / GROUP * GROUP; start < stop; start += KEYS) {
        int seen = (int)smaller(KEYS, stop - start), padded = (seen + GROUP - 1) / GROUP * GROUP;
        score(work, count, keys + start * HEAD_SIZE, padded);
        for (int x = from; x < count; x++) {
            int64_t position = positions[(x0 + x) / groups];
            int low = (int)larger(0, first_seen(position, window) - start), high = (int)smaller(seen, position + 1 - start);
            float *row = work->scores[x], *all_rows = sums + start, *last_row = all_rows + keys_sum;
            if (softcap > 0) soft_cap(row, padded, scaling, softcap);
            for (int i = 0; i < padded; i += WIDTH) {
                Floats weight = power_of_two(load(row + i) * factor - work->largest[x] * factor);
                store(row + i, weight * (1.0f / work->total[x]));
            }
            for (int i = low; i < high; i++) all_rows[i] += row[i];
            if (x >= of_last)
                for (int i = low; i < high; i++) last_row[i] += row[i];
        }
    }
}

/* Output of QUERIES queries of head h from query x0 on, over its packed keys and its values, whose `value_row` numbers are from
   a key's to the next's. */
static void attend(Workspace *work, const Rows *q, const int64_t *positions, int64_t x0, int64_t queries, int64_t h,
                   int64_t kv_heads, int64_t groups, int64_t window, const Element *keys, const Element *values,
                   int64_t value_row, float scaling, float softcap, const float *sinks, Element *out,
                   int64_t weighed_from, float *sums, int64_t keys_sum) {
    int count = (int)smaller(QUERIES, queries - x0);
    memset(work->queries[count], 0, (QUERIES - count) * sizeof work->queries[0]);
    memset(work->sums, 0, sizeof work->sums);
    for (int x = 0; x < count; x++) {
        int64_t row = (x0 + x) / groups, group = (x0 + x) % groups;
        memcpy(work->queries[x], q->at + row * q->row + (h * groups + group) * q->head, sizeof work->queries[0]);
        work->largest[x] = sinks == NULL ? HIDDEN : sinks[h * groups + group] / (softcap > 0 ? 1.0f : scaling);
        work->total[x] = sinks != NULL;
    }
    int64_t first = first_seen(positions[x0 / groups], window), stop = positions[(x0 + count - 1) / groups] + 1;
    for (int64_t start = first / GROUP * GROUP; start < stop; start += KEYS) {
        int seen = (int)smaller(KEYS, stop - start), padded = (seen + GROUP - 1) / GROUP * GROUP;
        score(work, count, keys + start * HEAD_SIZE, padded);
        for (int x = 0; x < count; x++) {
            int64_t position = positions[(x0 + x) / groups];
            int64_t low = larger(0, first_seen(position, window) - start), high = smaller(padded, position + 1 - start);
            weigh(work, x, (int)smaller(low, padded), (int)larger(0, high), padded, scaling, softcap);
        }
        add_values(work, count, values + start * value_row, value_row, seen);
    }
    int from = (int)larger(0, weighed_from * groups - x0), of_last = (int)larger(0, queries - groups - x0);
    if (sums != NULL && from < count)
        weigh_again(work, keys, positions, x0, from, count, of_last, groups, window, scaling, softcap, sums, keys_sum);
    for (int x = 0; x < count; x++) {
        int64_t row = (x0 + x) / groups, group = (x0 + x) % groups;
        Element *to = out + ((row * kv_heads + h) * groups + group) * HEAD_SIZE;
        float part = 1.0f / work->total[x];
        for (int i = 0; i < HEAD_SIZE; i += 2 * WIDTH)
            put(to + i, load(work->sums[x] + i) * part, load(work->sums[x] + i + WIDTH) * part);
    }
}

/* Writes the rows' output, (S, H x G, D), and unless `weights` is NULL the sums of weights over heads, (2, N): of the rows from
   `weighed_from` on, and of the last row. `positions` are sorted; `window`: see `first_seen`; `sinks` are (H x G) scores of no
   key, or NULL. Returns 0, or 1 where memory is short. */
int row_attention(const Rows *q, const Rows *k, const Rows *v, const int64_t *positions, int64_t rows, int64_t kv_heads,
                  int64_t groups, int64_t window, float scaling, float softcap, const float *sinks, int threads, Element *out,
                  int64_t weighed_from, float *weights) {
    int64_t first = first_seen(positions[0], window) / GROUP, stop = positions[rows - 1] + 1;
    int64_t key_groups = (stop + GROUP - 1) / GROUP, head = key_groups * GROUP * HEAD_SIZE;
    int64_t queries = rows * groups, tasks = (queries + QUERIES - 1) / QUERIES;
    int64_t head_bytes = (1 + PACKS_VALUES) * head * (int64_t)sizeof(Element);
    int64_t together = smaller(kv_heads, larger(1, PACKED / head_bytes)); /* KV heads that are packed at a time */
    size_t packed = (size_t)(together * head_bytes), own = (sizeof(Workspace) + 63) / 64 * 64;
    /* What each task adds up stays apart, so that sums do not depend on which thread was first. */
    int64_t first_weighed = weighed_from * groups / QUERIES, weighed = tasks - first_weighed, numbers = 2 * stop;
    float *sums = weights == NULL ? NULL : calloc(kv_heads * weighed * numbers, sizeof(float));
    char *memory = aligned_alloc(64, packed + threads * own);
    if (memory == NULL || (weights != NULL && sums == NULL)) {
        free(memory);
        free(sums);
        return 1;
    }
    Element *packed_keys = (Element *)memory, *packed_values = packed_keys + together * head;
#pragma omp parallel num_threads(threads)
    {
        Workspace *work = (Workspace *)(memory + packed + omp_get_thread_num() * own);
        begin_thread();
        for (int64_t h0 = 0; h0 < kv_heads; h0 += together) {
            int64_t heads = smaller(together, kv_heads - h0);
#pragma omp for schedule(static) collapse(2)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t group = first; group < key_groups; group++) {
                    int64_t start = group * GROUP, at = h * head + start * HEAD_SIZE;
                    int count = (int)smaller(GROUP, stop - start);
                    pack_keys(k->at + (h0 + h) * k->head + start * k->row, k->row, count, packed_keys + at);
                    if (PACKS_VALUES)
                        pack_values(v->at + (h0 + h) * v->head + start * v->row, v->row, count, packed_values + at);
                }
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < tasks * heads; task++) { /* the last queries see the most keys */
                int64_t h = task % heads, part = tasks - 1 - task / heads, x0 = part * QUERIES;
                int is_weighed = sums != NULL && part >= first_weighed;
                float *own_sums = is_weighed ? sums + ((h0 + h) * weighed + part - first_weighed) * numbers : NULL;
                const Element *values = PACKS_VALUES ? packed_values + h * head : v->at + (h0 + h) * v->head;
                attend(work, q, positions, x0, queries, h0 + h, kv_heads, groups, window, packed_keys + h * head, values,
                       PACKS_VALUES ? HEAD_SIZE : v->row, scaling, softcap, sinks, out, weighed_from, own_sums, stop);
            }
        }
        if (sums != NULL) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < numbers; i++) {
                float sum = 0;
                for (int64_t part = 0; part < kv_heads * weighed; part++) sum += sums[part * numbers + i];
                weights[i] = sum;
            }
        }
        end_thread();
    }
    free(memory);
    free(sums);
    return 0;
}
