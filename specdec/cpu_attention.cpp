// Attention of a packed step's grid over the slot cache, on a CPU. The contract is in specdec/cpu_attention.py.
//
// One item of work is one row, one head of keys and values, and one piece of its slots: the R = count * groups query
// rows that share those keys. A piece is walked in blocks of BLOCK slots with a running maximum and sum (Milakov &
// Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>

typedef float Vec __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

constexpr int64_t LANES = 16;
constexpr int64_t BLOCK = 64;
constexpr float HIDDEN = -3e38f; // score of a slot that is not seen: its exponential is zero beside NOTHING
constexpr float NOTHING = -1e30f; // running maximum before anything is seen

struct Row {
    int64_t first, last, place, start; // packed tokens [first, last), its cache place, slot of the first token

    int64_t count() const { return last - first; }
    int64_t end() const { return start + count(); }
};

static inline Vec load(const float *p) { return *(const Vec *)p; }
static inline Vec load(const uint16_t *p) { return (Vec)(__builtin_convertvector(*(const Halves *)p, Words) << 16); }

static inline void store(float *p, Vec x) { *(Vec *)p = x; }
static inline void store(uint16_t *p, Vec x) { // to nearest, ties to even
    Words bits = (Words)x;
    *(Halves *)p = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
}

static inline Vec all(float x) { return x - (Vec){}; }

static inline Vec exponential(Vec x) { // of x <= 0, to 2e-7; 0 below -87
    Vec scaled = x * 1.44269504f;
    Ints whole = __builtin_convertvector(scaled - 0.5f, Ints);
    Vec rest = (scaled - __builtin_convertvector(whole, Vec)) * 0.69314718f; // within (-0.35, 0.35)
    Vec sum = all(1.f / 720);
    for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) sum = sum * rest + c;
    Vec result = sum * (Vec)((whole + 127) << 23);
    return (Vec)((Ints)result & (x > -87.f));
}

// Columns of a 16 x 16 tile become its rows.
static inline void transpose(Vec (&tile)[LANES]) {
#define STAGE(width, ...)                                                                                              \
    for (int i = 0; i < LANES; i++)                                                                                    \
        if (!(i & width)) {                                                                                            \
            Vec a = tile[i], b = tile[i + width];                                                                      \
            const Ints low = {__VA_ARGS__};                                                                            \
            tile[i] = __builtin_shuffle(a, b, low);                                                                    \
            tile[i + width] = __builtin_shuffle(a, b, low + width);                                                    \
        }
    STAGE(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
    STAGE(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
    STAGE(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
    STAGE(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef STAGE
}

// out[R][columns] += a[R][depth] b[depth][columns], `rows` rows of `a` at a time, whose sums stay in registers.
template <int rows, int vecs>
static inline void product(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *out,
                           int64_t out_stride) {
    Vec sums[rows][vecs];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) sums[r][v] = load(out + r * out_stride + v * LANES);
    for (int64_t k = 0; k < depth; k++)
        for (int v = 0; v < vecs; v++) {
            Vec right = load(b + k * b_stride + v * LANES);
            for (int r = 0; r < rows; r++) sums[r][v] += a[r * a_stride + k] * right;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) store(out + r * out_stride + v * LANES, sums[r][v]);
}

template <int vecs>
static void product(int64_t R, const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth,
                    float *out, int64_t out_stride) {
    int64_t r = 0;
    for (; r + 3 <= R; r += 3)
        product<3, vecs>(a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride, out_stride);
    for (; r < R; r++)
        product<1, vecs>(a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride, out_stride);
}

static void product(int64_t R, int64_t columns, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                    int64_t depth, float *out, int64_t out_stride) {
    int64_t c = 0;
    for (; c + 4 * LANES <= columns; c += 4 * LANES)
        product<4>(R, a, a_stride, b + c, b_stride, depth, out + c, out_stride);
    for (; c < columns; c += LANES) product<1>(R, a, a_stride, b + c, b_stride, depth, out + c, out_stride);
}

// What a piece leaves: out[R][Dv] = sum of exp(score - top) * value, and per query row top and sum.
struct Partial {
    float *out, *top, *sum;
};

template <typename T>
struct Attention {
    const T *query; // [H, M, D], strides head, token
    int64_t query_head, query_token;
    const T *keys, *values; // [place, H_kv, slot, D or Dv], strides place, head
    int64_t keys_place, keys_head, values_place, values_head;
    int64_t H_kv, G, D, Dv, window; // window: 0 for none
    float scaling;
    const uint8_t *visible; // [place, width, slots], or null for causal rows
    int64_t width, slots;

    // Slots [begin, end) of a row and head h. scratch: floats, `scratch_size(R)` of them.
    void piece(const Row &row, int64_t h, int64_t begin, int64_t end, float *scratch, Partial to) const {
        const int64_t R = row.count() * G;
        float *q = scratch, *block = q + R * D, *scores = block + BLOCK * std::max(D, Dv);
        for (int64_t r = 0; r < R; r++) {
            const T *from = query + (h * G + r % G) * query_head + (row.first + r / G) * query_token;
            for (int64_t d = 0; d < D; d += LANES) store(q + r * D + d, load(from + d) * scaling);
            to.top[r] = NOTHING, to.sum[r] = 0;
        }
        std::memset(to.out, 0, R * Dv * sizeof(float));
        for (int64_t slot = begin; slot < end; slot += BLOCK) {
            const int64_t filled = std::min(BLOCK, end - slot);
            keys_by_column(keys + row.place * keys_place + h * keys_head + slot * D, filled, block);
            std::memset(scores, 0, R * BLOCK * sizeof(float));
            product(R, BLOCK, q, D, block, BLOCK, D, scores, BLOCK);
            for (int64_t r = 0; r < R; r++) {
                hide(row, r / G, slot, filled, scores + r * BLOCK);
                weigh(scores + r * BLOCK, to.out + r * Dv, to.top[r], to.sum[r]);
            }
            const T *from = values + row.place * values_place + h * values_head + slot * Dv;
            for (int64_t k = 0; k < filled * Dv; k += LANES) store(block + k, load(from + k));
            product(R, Dv, scores, BLOCK, block, Dv, filled, to.out, Dv);
        }
    }

    int64_t scratch_size(int64_t R) const { return R * D + BLOCK * std::max(D, Dv) + R * BLOCK; }

    // [D, BLOCK] from [filled, D]; columns past `filled` hold zeros.
    void keys_by_column(const T *from, int64_t filled, float *to) const {
        for (int64_t s = 0; s < BLOCK; s += LANES)
            for (int64_t d = 0; d < D; d += LANES) {
                Vec tile[LANES];
                for (int64_t k = 0; k < LANES; k++) tile[k] = s + k < filled ? load(from + (s + k) * D + d) : (Vec){};
                transpose(tile);
                for (int64_t k = 0; k < LANES; k++) store(to + (d + k) * BLOCK + s, tile[k]);
            }
    }

    // Takes from a row's token t what it does not see of slots [slot, slot + filled), and all past those.
    void hide(const Row &row, int64_t t, int64_t slot, int64_t filled, float *scores) const {
        if (visible) {
            const uint8_t *seen = visible + (row.place * width + t) * slots + slot;
            for (int64_t s = 0; s < BLOCK; s++) scores[s] = s < filled && seen[s] ? scores[s] : HIDDEN;
            return;
        }
        const int64_t own = row.start + t - slot; // the token's own slot, counted from the block's first
        const int64_t after = std::min(filled, own + 1), before = window ? own - window + 1 : 0;
        for (int64_t s = std::max<int64_t>(after, 0); s < BLOCK; s++) scores[s] = HIDDEN;
        for (int64_t s = 0; s < std::min(before, BLOCK); s++) scores[s] = HIDDEN;
    }

    // Scores become exp(score - top); what was summed before is brought to the new top.
    void weigh(float *scores, float *out, float &top, float &sum) const {
        Vec high = all(top), total = {};
        for (int64_t s = 0; s < BLOCK; s += LANES) high = load(scores + s) > high ? load(scores + s) : high;
        float highest = top;
        for (int64_t lane = 0; lane < LANES; lane++) highest = std::max(highest, high[lane]);
        for (int64_t s = 0; s < BLOCK; s += LANES) {
            Vec weight = exponential(load(scores + s) - highest);
            store(scores + s, weight);
            total += weight;
        }
        const float kept = exponential(all(top - highest))[0];
        for (int64_t d = 0; d < Dv && kept != 1; d += LANES) store(out + d, load(out + d) * kept);
        float added = 0;
        for (int64_t lane = 0; lane < LANES; lane++) added += total[lane];
        sum = sum * kept + added, top = highest;
    }
};

template <typename T>
static void write(T *to, int64_t place_stride, int64_t head_stride, int64_t H_kv, int64_t D, const T *from,
                  int64_t from_head, int64_t from_token, int64_t M, const int64_t *places, const int64_t *slots) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t h = 0; h < H_kv; h++)
            std::memcpy(to + places[m] * place_stride + h * head_stride + slots[m] * D,
                        from + h * from_head + m * from_token, D * sizeof(T));
}

template <typename T>
static void attend(const Attention<T> &a, const Row *rows, int64_t n, T *out) {
    const int64_t threads = omp_get_max_threads();
    int64_t longest = 0, widest = 0;
    for (int64_t i = 0; i < n; i++) {
        longest = std::max(longest, rows[i].end());
        widest = std::max(widest, rows[i].count() * a.G);
    }
    // A row's slots are cut only where rows and heads alone would leave a thread without work.
    const int64_t wanted = std::max<int64_t>(1, 4 * threads / (n * a.H_kv));
    const int64_t blocks = (longest + BLOCK - 1) / BLOCK, pieces = std::min(wanted, blocks);
    const int64_t length = (blocks + pieces - 1) / pieces * BLOCK, items = n * a.H_kv * pieces;
    const int64_t size = widest * (a.Dv + 2);
    std::vector<float> partials(items * size), scratch(threads * a.scratch_size(widest));
    auto partial = [&](int64_t item, int64_t R) {
        float *at = partials.data() + item * size;
        return Partial{at, at + R * a.Dv, at + R * (a.Dv + 1)};
    };
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; item++) {
        const int64_t i = item / (a.H_kv * pieces), h = item / pieces % a.H_kv, z = item % pieces;
        const Row &row = rows[i];
        const int64_t seen = a.window ? std::max<int64_t>(0, row.start - a.window + 1) : 0;
        const int64_t begin = std::max(z * length, seen / BLOCK * BLOCK);
        a.piece(row, h, begin, std::min((z + 1) * length, row.end()),
                scratch.data() + omp_get_thread_num() * a.scratch_size(widest), partial(item, row.count() * a.G));
    }
    std::vector<float> share(pieces);
    for (int64_t i = 0; i < n; i++)
        for (int64_t h = 0; h < a.H_kv; h++)
            for (int64_t r = 0, R = rows[i].count() * a.G; r < R; r++) {
                const int64_t item = (i * a.H_kv + h) * pieces;
                float top = NOTHING, sum = 0;
                for (int64_t z = 0; z < pieces; z++) top = std::max(top, partial(item + z, R).top[r]);
                for (int64_t z = 0; z < pieces; z++) {
                    share[z] = std::exp(partial(item + z, R).top[r] - top);
                    sum += share[z] * partial(item + z, R).sum[r];
                }
                T *to = out + ((rows[i].first + r / a.G) * a.H_kv * a.G + h * a.G + r % a.G) * a.Dv;
                for (int64_t d = 0; d < a.Dv; d += LANES) {
                    Vec total = {};
                    for (int64_t z = 0; z < pieces; z++) total += load(partial(item + z, R).out + r * a.Dv + d) * share[z];
                    store(to + d, total / sum);
                }
            }
}

#define EXPORT(name, T)                                                                                                \
    extern "C" void name(                                                                                              \
        const T *query, int64_t query_head, int64_t query_token, const T *key, int64_t key_head, int64_t key_token,    \
        const T *value, int64_t value_head, int64_t value_token, T *keys, int64_t keys_place, int64_t keys_head,       \
        T *values, int64_t values_place, int64_t values_head, int64_t H_kv, int64_t G, int64_t D, int64_t Dv,          \
        int64_t window, double scaling, const uint8_t *visible, int64_t width, int64_t slots, int64_t M,               \
        const int64_t *token_places, const int64_t *token_slots, const Row *rows, int64_t n, T *out) {                 \
        write(keys, keys_place, keys_head, H_kv, D, key, key_head, key_token, M, token_places, token_slots);           \
        write(values, values_place, values_head, H_kv, Dv, value, value_head, value_token, M, token_places,            \
              token_slots);                                                                                            \
        const Attention<T> a{query, query_head, query_token, keys, values, keys_place, keys_head, values_place,        \
                             values_head, H_kv, G, D, Dv, window, (float)scaling, visible, width, slots};              \
        if (n) attend(a, rows, n, out);                                                                                \
    }

EXPORT(attend_float32, float)
EXPORT(attend_bfloat16, uint16_t)
