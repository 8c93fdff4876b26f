/* Attention of chosen rows of a prompt, each over all keys up to its own position, by the matrix instructions of AMX; and the
   rotation of the keys.

Compiled on the machine that runs it, for one head size: see attention.py. Keys and values are packed into the order of
the instructions once a call, some KV heads at a time. Then every thread takes QUERIES queries of one KV head at a time through
the keys that they see, KEYS at a time: scores, softmax with what the keys before have left (FlashAttention's), and the sum of
the values.

Shapes: S rows, H KV heads, G query heads of a KV head, X = S x G queries of a KV head, N keys, D head size. */

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#if HEAD_SIZE % 32
#error "a tile takes 32 numbers of a head"
#endif
#define QUERIES 32 /* two tiles */
#define KEYS 256   /* so that a thread's scores stay in its first cache */
#define GROUP 32   /* keys that are packed together: two tiles of keys, or the depth of one of values */
#define TILE 512   /* 16-bit numbers of one */
#define SCORES (KEYS + 16) /* numbers from a row to the next; a power of two apart, rows would share places in the cache */
#define WEIGHTS (KEYS + 32)
#define PACKED (1 << 22) /* numbers that are packed at a time: memory that the C library keeps for the next call */
#define HIDDEN (-1e30f)
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

typedef uint16_t Element; /* bfloat16 */

/* Rows that are read: elements from one row to the next, and from one head to the next. */
typedef struct {
    const Element *at;
    int64_t row, head;
} Rows;

/* What a thread works in. */
typedef struct {
    Element queries[QUERIES][HEAD_SIZE], weights[QUERIES][WEIGHTS];
    float scores[QUERIES][SCORES], sums[QUERIES][HEAD_SIZE], largest[QUERIES], total[QUERIES];
} Workspace;

/* Asks the system for the tiles' registers, which a process may use only after that. Returns 0 where it may. */
int prepare(void) { return (int)syscall(SYS_arch_prctl, PERMISSION, TILE_DATA); }

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

/* Turns keys (heads, rows, D) in place, the first `half` numbers of each against the next; `cosines` and `sines` have
   `table_row` numbers a row. With `rounds_products` each product is rounded before they are added, as models in bfloat16 do. */
void rotate(Element *keys, int64_t head, int64_t row, int64_t heads, int64_t rows, const Element *cosines, const Element *sines,
            int64_t table_row, int64_t half, int rounds_products, int threads) {
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t h = 0; h < heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            Element *first = keys + h * head + r * row, *second = first + half;
            const Element *cosine = cosines + r * table_row, *sine = sines + r * table_row;
            if (rounds_products)
                for (int64_t i = 0; i < half; i++) {
                    float a = widen(first[i]), b = widen(second[i]), c = widen(cosine[i]), s = widen(sine[i]);
                    first[i] = narrow(widen(narrow(a * c)) - widen(narrow(b * s)));
                    second[i] = narrow(widen(narrow(b * c)) + widen(narrow(a * s)));
                }
            else
                for (int64_t i = 0; i < half; i++) {
                    float a = widen(first[i]), b = widen(second[i]), c = widen(cosine[i]), s = widen(sine[i]);
                    first[i] = narrow(a * c - b * s);
                    second[i] = narrow(b * c + a * s);
                }
        }
}

static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    IN_MEMORY;
    _tile_loadconfig(&config);
}

/* 2 to the power of x <= 0, to 1e-4 relative: weights are rounded to 8 bits, 4e-3. */
static inline __m512 power_of_two(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), rest = _mm512_sub_ps(x, whole);
    __m512 series = _mm512_fmadd_ps(_mm512_set1_ps(5.592204e-2f), rest, _mm512_set1_ps(2.4264008e-1f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(6.9312103e-1f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(9.9992448e-1f));
    return _mm512_scalef_ps(series, whole);
}

/* cap * tanh(x / cap) of a row of scores, which come unscaled. */
static void soft_cap(float *row, int count, float scaling, float cap) {
    __m512 sign = _mm512_set1_ps(-0.0f), one = _mm512_set1_ps(1.0f);
    for (int i = 0; i < count; i += 16) {
        __m512 x = _mm512_loadu_ps(row + i);
        __m512 size = _mm512_mul_ps(_mm512_or_ps(x, sign), _mm512_set1_ps(2.0f * 1.44269504f * scaling / cap));
        __m512 small = power_of_two(_mm512_max_ps(size, _mm512_set1_ps(-126.0f)));
        __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, small), _mm512_add_ps(one, small));
        _mm512_storeu_ps(row + i, _mm512_mul_ps(_mm512_or_ps(tanh, _mm512_and_ps(x, sign)), _mm512_set1_ps(cap)));
    }
}

/* GROUP keys of a head, `count` of which there are: tiles [D / 32][2 x 16 keys], a row of which has two numbers of every key. */
static void pack_keys(const Element *keys, int64_t row, int count, Element *packed) {
    for (int part = 0; part < HEAD_SIZE / 32; part++)
        for (int half = 0; half < 2; half++, packed += TILE) {
            uint32_t *to = (uint32_t *)packed;
            for (int key = 0; key < 16; key++) {
                uint32_t pairs[16] = {0};
                if (16 * half + key < count) memcpy(pairs, keys + (16 * half + key) * row + 32 * part, sizeof pairs);
                for (int pair = 0; pair < 16; pair++) to[16 * pair + key] = pairs[pair];
            }
        }
}

/* GROUP values of a head: tiles [D / 16], in which a row has a number of every of 16 places, of two neighbouring keys. */
static void pack_values(const Element *values, int64_t row, int count, Element *packed) {
    for (int pair = 0; pair < GROUP / 2; pair++) {
        Element none[HEAD_SIZE] = {0};
        const Element *first = 2 * pair < count ? values + 2 * pair * row : none;
        const Element *second = 2 * pair + 1 < count ? values + (2 * pair + 1) * row : none;
        for (int tile = 0; tile < HEAD_SIZE / 16; tile++) {
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(first + 16 * tile)));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(second + 16 * tile)));
            _mm512_storeu_si512(packed + tile * TILE + 32 * pair, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Scores of the queries over `groups` groups of keys. */
static void score(Workspace *work, const Element *keys, int groups) {
    IN_MEMORY;
    for (int group = 0; group < groups; group++) {
        float *to = &work->scores[0][GROUP * group];
        ZERO_SUMS;
        for (int part = 0; part < HEAD_SIZE / 32; part++, keys += 2 * TILE) {
            _tile_loadd(4, &work->queries[0][32 * part], HEAD_SIZE * sizeof(Element));
            _tile_loadd(5, &work->queries[16][32 * part], HEAD_SIZE * sizeof(Element));
            _tile_loadd(6, keys, 64);
            _tile_loadd(7, keys + TILE, 64);
            ADD_PRODUCTS;
        }
        MOVE_SUMS(_tile_stored, to, SCORES);
    }
}

/* Weights of query x over `count` keys, a multiple of 32, of which it sees those from `low` to before `high`. What its sums and
   total were for is scaled down where a score is larger than all before. */
static void weigh(Workspace *work, int x, int low, int high, int count, float scaling, float softcap) {
    float *row = work->scores[x];
    if (low >= high) {
        memset(work->weights[x], 0, count * sizeof(Element));
        return;
    }
    if (softcap > 0) soft_cap(row, count, scaling, softcap), scaling = 1.0f;
    for (int i = 0; i < low; i++) row[i] = HIDDEN;
    for (int i = high; i < count; i++) row[i] = HIDDEN;
    __m512 most = _mm512_set1_ps(work->largest[x]), other = most, total = _mm512_setzero_ps();
    __m512 factor = _mm512_set1_ps(scaling * 1.44269504f);
    for (int i = 0; i < count; i += 32) {
        most = _mm512_max_ps(most, _mm512_loadu_ps(row + i));
        other = _mm512_max_ps(other, _mm512_loadu_ps(row + i + 16));
    }
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(most, other));
    if (largest > work->largest[x]) {
        __m512 down = power_of_two(_mm512_mul_ps(_mm512_set1_ps(work->largest[x] - largest), factor));
        for (int i = 0; i < HEAD_SIZE; i += 16)
            _mm512_storeu_ps(work->sums[x] + i, _mm512_mul_ps(_mm512_loadu_ps(work->sums[x] + i), down));
        work->total[x] *= _mm512_cvtss_f32(down);
        work->largest[x] = largest;
    }
    __m512 shift = _mm512_mul_ps(_mm512_set1_ps(largest), factor);
    for (int i = 0; i < count; i += 32) {
        __m512 first = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row + i), factor, shift));
        __m512 second = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row + i + 16), factor, shift));
        total = _mm512_add_ps(total, _mm512_add_ps(first, second));
        _mm512_storeu_si512(work->weights[x] + i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
    work->total[x] += _mm512_reduce_add_ps(total);
}

/* Adds the values of `groups` groups of keys to the queries' sums, by their weights. */
static void add_values(Workspace *work, const Element *values, int groups) {
    for (int part = 0; part < HEAD_SIZE; part += 32) {
        float *sums = &work->sums[0][part];
        MOVE_SUMS(_tile_loadd, sums, HEAD_SIZE);
        for (int group = 0; group < groups; group++) {
            const Element *from = values + group * GROUP * HEAD_SIZE + part / 16 * TILE;
            _tile_loadd(4, &work->weights[0][GROUP * group], WEIGHTS * sizeof(Element));
            _tile_loadd(5, &work->weights[16][GROUP * group], WEIGHTS * sizeof(Element));
            _tile_loadd(6, from, 64);
            _tile_loadd(7, from + TILE, 64);
            ADD_PRODUCTS;
        }
        MOVE_SUMS(_tile_stored, sums, HEAD_SIZE);
    }
}

/* Weights of query x over its keys, from `first` to before `stop`, once its largest score and total are known. */
static void weigh_again(Workspace *work, const Element *keys, int x, int64_t first, int64_t stop, float scaling, float softcap,
                        float *weights) {
    for (int64_t start = first / GROUP * GROUP; start < stop; start += KEYS) {
        int seen = (int)smaller(KEYS, stop - start), hidden = (int)larger(0, first - start);
        int groups = (seen + GROUP - 1) / GROUP;
        float *row = work->scores[x];
        score(work, keys + start * HEAD_SIZE, groups);
        if (softcap > 0) soft_cap(row, GROUP * groups, scaling, softcap);
        __m512 factor = _mm512_set1_ps(1.44269504f * (softcap > 0 ? 1.0f : scaling));
        __m512 shift = _mm512_mul_ps(_mm512_set1_ps(work->largest[x]), factor), part = _mm512_set1_ps(1.0f / work->total[x]);
        for (int i = 0; i < seen; i += 16) {
            __m512 weight = power_of_two(_mm512_fmsub_ps(_mm512_loadu_ps(row + i), factor, shift));
            _mm512_storeu_ps(row + i, _mm512_mul_ps(weight, part));
        }
        memcpy(weights + start + hidden, row + hidden, (seen - hidden) * sizeof(float));
    }
}

/* Output of QUERIES queries of head h from query x0 on, over its packed keys and values. */
static void attend(Workspace *work, const Rows *q, const int64_t *positions, int64_t x0, int64_t queries, int64_t h,
                   int64_t kv_heads, int64_t groups, int64_t window, const Element *keys, const Element *values, float scaling,
                   float softcap, Element *out, float *last, int64_t last_keys) {
    int count = (int)smaller(QUERIES, queries - x0);
    memset(work->queries[count], 0, (QUERIES - count) * sizeof work->queries[0]);
    memset(work->sums, 0, sizeof work->sums);
    for (int x = 0; x < count; x++) {
        int64_t row = (x0 + x) / groups, group = (x0 + x) % groups;
        memcpy(work->queries[x], q->at + row * q->row + (h * groups + group) * q->head, sizeof work->queries[0]);
        work->largest[x] = HIDDEN, work->total[x] = 0;
    }
    int64_t first = larger(0, positions[x0 / groups] + 1 - window), stop = positions[(x0 + count - 1) / groups] + 1;
    for (int64_t start = first / GROUP * GROUP; start < stop; start += KEYS) {
        int key_groups = (int)((smaller(KEYS, stop - start) + GROUP - 1) / GROUP), seen = GROUP * key_groups;
        score(work, keys + start * HEAD_SIZE, key_groups);
        for (int x = 0; x < count; x++) {
            int64_t position = positions[(x0 + x) / groups];
            int64_t low = larger(0, position + 1 - window - start), high = smaller(seen, position + 1 - start);
            weigh(work, x, (int)smaller(low, seen), (int)larger(0, high), seen, scaling, softcap);
        }
        add_values(work, values + start * HEAD_SIZE, key_groups);
    }
    for (int x = 0; last != NULL && x < count; x++)
        if (x0 + x >= queries - groups) {
            int64_t seen = positions[(x0 + x) / groups] + 1;
            int64_t head = h * groups + (x0 + x) % groups;
            weigh_again(work, keys, x, larger(0, seen - window), seen, scaling, softcap, last + head * last_keys);
        }
    for (int x = 0; x < count; x++) {
        int64_t row = (x0 + x) / groups, group = (x0 + x) % groups;
        Element *to = out + ((row * kv_heads + h) * groups + group) * HEAD_SIZE;
        __m512 part = _mm512_set1_ps(1.0f / work->total[x]);
        for (int i = 0; i < HEAD_SIZE; i += 32) {
            __m512 low = _mm512_mul_ps(_mm512_loadu_ps(work->sums[x] + i), part);
            __m512 high = _mm512_mul_ps(_mm512_loadu_ps(work->sums[x] + i + 16), part);
            _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
}

/* Writes the rows' output, (S, H x G, D), and unless `last` is NULL the weights of the last row's queries over the keys that
   they see, (H x G, last_keys). `positions` are sorted; `window` is a row's number of visible keys. Returns 0, or 1 where
   memory is short. */
int row_attention(const Rows *q, const Rows *k, const Rows *v, const int64_t *positions, int64_t rows, int64_t kv_heads,
                  int64_t groups, int64_t window, float scaling, float softcap, int threads, Element *out, float *last,
                  int64_t last_keys) {
    int64_t first = larger(0, positions[0] + 1 - window) / GROUP, stop = positions[rows - 1] + 1;
    int64_t key_groups = (stop + GROUP - 1) / GROUP, head = key_groups * GROUP * HEAD_SIZE;
    int64_t queries = rows * groups, tasks = (queries + QUERIES - 1) / QUERIES;
    int64_t together = smaller(kv_heads, larger(1, PACKED / (2 * head))); /* KV heads that are packed at a time */
    size_t packed = (size_t)(2 * together * head) * sizeof(Element), own = (sizeof(Workspace) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, packed + threads * own);
    if (memory == NULL) return 1;
    Element *keys = (Element *)memory, *values = keys + together * head;
#pragma omp parallel num_threads(threads)
    {
        Workspace *work = (Workspace *)(memory + packed + omp_get_thread_num() * own);
        begin_tiles();
        for (int64_t h0 = 0; h0 < kv_heads; h0 += together) {
            int64_t heads = smaller(together, kv_heads - h0);
#pragma omp for schedule(static) collapse(2)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t group = first; group < key_groups; group++) {
                    int64_t start = group * GROUP, at = h * head + start * HEAD_SIZE;
                    int count = (int)smaller(GROUP, stop - start);
                    pack_keys(k->at + (h0 + h) * k->head + start * k->row, k->row, count, keys + at);
                    pack_values(v->at + (h0 + h) * v->head + start * v->row, v->row, count, values + at);
                }
#pragma omp for schedule(dynamic, 1)
            for (int64_t task = 0; task < tasks * heads; task++) { /* the last queries see the most keys */
                int64_t h = task % heads, x0 = (tasks - 1 - task / heads) * QUERIES;
                attend(work, q, positions, x0, queries, h0 + h, kv_heads, groups, window, keys + h * head, values + h * head,
                       scaling, softcap, out, last, last_keys);
            }
        }
        _tile_release();
    }
    free(memory);
    return 0;
}
