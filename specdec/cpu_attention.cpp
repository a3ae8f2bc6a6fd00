// Attention of a packed step over the slot cache, on a CPU. The contract is in specdec/cpu_attention.py.
//
// Slots are walked in pieces of PIECE, and in those in blocks of BLOCK with a running maximum and sum (Milakov &
// Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3); pieces are then merged in their order. A
// token's sums run over its own slots in an order that nothing else decides: not the rows beside it, not how many of
// its own row's tokens come with it, not the threads. So its result is the same bits in whatever step.

#include <memory>

constexpr int64_t BLOCK = 64, PIECE = 128; // slots; head sizes are multiples of PAIR
constexpr int64_t QUERIES = 48; // of a prompt chunk that share what is read of the cache
constexpr int ROWS = 6; // of a product, with four registers of sums each
constexpr float HIDDEN = -3e38f; // score of a slot that is not seen: its exponential is zero beside NOTHING
constexpr float NOTHING = -1e30f; // running maximum before anything is seen

struct Row {
    int64_t first, last, place, start; // packed tokens [first, last), its cache place, slot of the first token

    int64_t count() const { return last - first; }
    int64_t end() const { return start + count(); }
};

static inline Vec all(float x) { return x - (Vec){}; }

// Of all lanes, as a tree: one after the other they would wait for each other.
template <typename Op>
static inline float over_lanes(Vec x, Op op) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int away = 8; away; away /= 2) x = op(x, __builtin_shuffle(x, lane ^ away));
    return x[0];
}
static inline Vec greater(Vec a, Vec b) { return a > b ? a : b; }
static inline Vec sum(Vec a, Vec b) { return a + b; }

static inline Vec exponential(Vec x) { // of x <= 0, to 2e-7; 0 below -87, NaN of NaN
    Vec scaled = x * 1.44269504f;
    Ints whole = __builtin_convertvector(scaled - 0.5f, Ints);
    Vec rest = (scaled - __builtin_convertvector(whole, Vec)) * 0.69314718f; // within (-0.35, 0.35)
    Vec sum = all(1.f / 720);
    for (float c : {1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2, 1.f, 1.f}) sum = sum * rest + c;
    Vec result = sum * (Vec)((whole + 127) << 23);
    return (Vec)((Ints)result & ~(x <= -87.f));
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

// [LANES][BLOCK] or [PAIR][BLOCK] of a register's columns of LANES slots, `n` of which are there.
static inline void columns(const float *from, int64_t stride, int64_t n, float *to) {
    for (int64_t half = 0; half < PAIR; half += LANES) {
        Vec tile[LANES];
        for (int64_t s = 0; s < LANES; s++) tile[s] = s < n ? load(from + s * stride + half) : (Vec){};
        transpose(tile);
        for (int64_t d = 0; d < LANES; d++) store(to + (half + d) * BLOCK, tile[d]);
    }
}
static inline void columns(const uint16_t *from, int64_t stride, int64_t n, float *to) {
    Vec tile[LANES];
    for (int64_t s = 0; s < LANES; s++) tile[s] = s < n ? *(const Vec *)(from + s * stride) : (Vec){};
    transpose(tile);
    for (int64_t d = 0; d < LANES; d++) {
        store(to + 2 * d * BLOCK, (Vec)((Words)tile[d] << 16));
        store(to + (2 * d + 1) * BLOCK, (Vec)((Words)tile[d] & 0xffff0000u));
    }
}

// out[rows][pairs of columns] += a[rows][depth] b[depth][columns].
template <int rows, int pairs, typename T>
static inline void product(const float *a, int64_t a_stride, const T *b, int64_t b_stride, int64_t depth, float *out,
                           int64_t out_stride) {
    Vec sums[rows][2 * pairs];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2 * pairs; v++) sums[r][v] = load(out + r * out_stride + v * LANES);
    for (int64_t k = 0; k < depth; k++) {
        Vec right[2 * pairs];
        for (int p = 0; p < pairs; p++) load_pair(b + k * b_stride + p * PAIR, right[2 * p], right[2 * p + 1]);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2 * pairs; v++) sums[r][v] += a[r * a_stride + k] * right[v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2 * pairs; v++) store(out + r * out_stride + v * LANES, sums[r][v]);
}

template <int rows, int pairs, typename T>
static void product_of(int64_t R, const float *a, int64_t a_stride, const T *b, int64_t b_stride, int64_t depth,
                       float *out, int64_t out_stride) {
    int64_t r = 0;
    for (; r + rows <= R; r += rows)
        product<rows, pairs>(a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride, out_stride);
    if constexpr (rows > 1)
        if (r < R)
            product_of<rows - 1, pairs>(R - r, a + r * a_stride, a_stride, b, b_stride, depth, out + r * out_stride,
                                        out_stride);
}

template <typename T>
static void product(int64_t R, int64_t columns, const float *a, int64_t a_stride, const T *b, int64_t b_stride,
                    int64_t depth, float *out, int64_t out_stride) {
    int64_t c = 0;
    for (; c + 2 * PAIR <= columns; c += 2 * PAIR)
        product_of<ROWS, 2>(R, a, a_stride, b + c, b_stride, depth, out + c, out_stride);
    if (c < columns) product_of<ROWS, 1>(R, a, a_stride, b + c, b_stride, depth, out + c, out_stride);
}

// What slots add to R query rows: out[R][Dv] = sum of exp(score - top) * value, and per query row top and sum.
struct Partial {
    float *out, *top, *sum;

    Partial(float *at, int64_t R, int64_t Dv) : out(at), top(at + R * Dv), sum(top + R) {}
    static int64_t size(int64_t R, int64_t Dv) { return R * (Dv + 2); }

    void clear(int64_t R, int64_t Dv) const {
        std::memset(out, 0, R * Dv * sizeof(float));
        for (int64_t r = 0; r < R; r++) top[r] = NOTHING, sum[r] = 0;
    }

    // Take in the slots that follow.
    void merge(const Partial &next, int64_t R, int64_t Dv) const {
        for (int64_t r = 0; r < R; r++) {
            const float highest = std::max(top[r], next.top[r]);
            const Vec kept = exponential(all(top[r] - highest)), added = exponential(all(next.top[r] - highest));
            for (int64_t d = r * Dv; d < (r + 1) * Dv; d += LANES)
                store(out + d, load(out + d) * kept + load(next.out + d) * added);
            sum[r] = sum[r] * kept[0] + next.sum[r] * added[0], top[r] = highest;
        }
    }
};

// Some tokens [from, to) of a row, counted from its first, and a head of keys and values: over all their slots, or only
// over those of one piece. Its partial is at `at`.
struct Item {
    int64_t row, head, from, to, piece, at;
};

constexpr int64_t ALL = -1; // pieces

template <typename T>
struct Attention {
    const T *query; // [H, M, D], strides head, token
    int64_t query_head, query_token;
    const T *keys, *values; // [place, H_kv, slot, D or Dv], strides place, head
    int64_t keys_place, keys_head, values_place, values_head;
    int64_t H_kv, G, D, Dv, window; // window: 0 for none
    float scaling;
    const Row *rows;
    int64_t n, grid; // rows, and how many of the first of them `visible` is for
    const uint8_t *visible; // [place, width, slots], or null for causal rows
    int64_t width, slots;
    T *out; // [M, H, Dv]

    // Slots past the last that a token before row token `to` may see, and the first that one from `from` on may.
    int64_t end_of(const Row &row, int64_t i, int64_t to) const { return row.start + (i < grid ? row.count() : to); }
    int64_t begin_of(const Row &row, int64_t from) const {
        return window ? std::max<int64_t>(0, row.start + from - window + 1) / BLOCK * BLOCK : 0;
    }

    int64_t scratch_size(int64_t R) const { return R * D + BLOCK * D + R * BLOCK + Partial::size(R, Dv); }

    void run(const Item &item, float *scratch, Partial result) const {
        const Row &row = rows[item.row];
        const int64_t R = (item.to - item.from) * G;
        float *q = scratch;
        for (int64_t r = 0; r < R; r++) {
            const T *from = query + (item.head * G + r % G) * query_head + (row.first + item.from + r / G) * query_token;
            for (int64_t d = 0; d < D; d += LANES) store(q + r * D + d, load(from + d) * scaling);
        }
        const int64_t begin = begin_of(row, item.from), end = end_of(row, item.row, item.to);
        result.clear(R, Dv);
        if (item.piece != ALL) return piece(item, row, R, begin, end, item.piece, q + R * D, result);
        const Partial part(q + R * D + BLOCK * D + R * BLOCK, R, Dv);
        for (int64_t z = begin / PIECE; z * PIECE < end; z++) {
            part.clear(R, Dv);
            piece(item, row, R, begin, end, z, q + R * D, part);
            result.merge(part, R, Dv);
        }
    }

    // The slots of piece z that are in [begin, end). block: what follows the query rows in the scratch.
    void piece(const Item &item, const Row &row, int64_t R, int64_t begin, int64_t end, int64_t z, float *block,
               Partial to) const {
        const float *q = block - R * D;
        float *scores = block + BLOCK * D;
        const T *own_keys = keys + row.place * keys_place + item.head * keys_head;
        const T *own_values = values + row.place * values_place + item.head * values_head;
        end = std::min(end, (z + 1) * PIECE);
        for (int64_t slot = std::max(begin, z * PIECE); slot < end; slot += BLOCK) {
            const int64_t filled = std::min(BLOCK, end - slot);
            keys_by_column(own_keys + slot * D, own_values + slot * Dv, filled, block);
            std::memset(scores, 0, R * BLOCK * sizeof(float));
            product(R, BLOCK, q, D, block, BLOCK, D, scores, BLOCK);
            for (int64_t r = 0; r < R; r++) {
                hide(row, item.row, item.from + r / G, slot, filled, scores + r * BLOCK);
                weigh(scores + r * BLOCK, to.out + r * Dv, to.top[r], to.sum[r]);
            }
            product(R, Dv, scores, BLOCK, own_values + slot * Dv, Dv, filled, to.out, Dv);
        }
    }

    // [D, BLOCK] from [filled, D]; columns past `filled` hold zeros. The values are fetched meanwhile, and the next keys.
    void keys_by_column(const T *from, const T *values, int64_t filled, float *to) const {
        constexpr int64_t LINE = 64 / sizeof(T);
        for (int64_t s = 0; s < BLOCK; s += LANES) {
            for (int64_t d = 0; d < LANES * Dv; d += LINE) __builtin_prefetch(values + s * Dv + d);
            for (int64_t d = 0; d < LANES * D; d += LINE) __builtin_prefetch(from + (s + BLOCK) * D + d);
            for (int64_t d = 0; d < D; d += PAIR) columns(from + s * D + d, D, filled - s, to + d * BLOCK + s);
        }
    }

    // Takes from a row's token t what it does not see of slots [slot, slot + filled), and all past those.
    void hide(const Row &row, int64_t i, int64_t t, int64_t slot, int64_t filled, float *scores) const {
        if (visible && i < grid) {
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
        for (int64_t s = 0; s < BLOCK; s += LANES) high = greater(load(scores + s), high);
        const float highest = over_lanes(high, greater);
        for (int64_t s = 0; s < BLOCK; s += LANES) {
            Vec weight = exponential(load(scores + s) - highest);
            store(scores + s, weight);
            total += weight;
        }
        const float kept = exponential(all(top - highest))[0];
        for (int64_t d = 0; d < Dv && kept != 1; d += LANES) store(out + d, load(out + d) * kept);
        sum = sum * kept + over_lanes(total, ::sum), top = highest;
    }

    void run() const {
        std::vector<Item> items, first; // first: of those that are merged, whose pieces follow it
        int64_t size = 0, widest = 0;
        for (int64_t i = 0; i < n; i++) {
            const int64_t most = i < grid ? rows[i].count() : std::max<int64_t>(1, QUERIES / G);
            widest = std::max(widest, std::min(most, rows[i].count()) * G);
            for (int64_t from = 0; from < rows[i].count(); from += most)
                for (int64_t h = 0; h < H_kv; h++) {
                    const int64_t to = std::min(from + most, rows[i].count());
                    const bool whole = i >= grid; // a chunk has work for every thread as it is
                    int64_t z = whole ? ALL : begin_of(rows[i], from) / PIECE;
                    const int64_t last = whole ? ALL : (end_of(rows[i], i, to) - 1) / PIECE;
                    for (int64_t start = z; z <= last; z++) {
                        if (z == start) first.push_back({i, h, from, to, last - start + 1, size});
                        items.push_back({i, h, from, to, z, size});
                        size += Partial::size((to - from) * G, Dv);
                    }
                }
        }
        const int64_t threads = omp_get_max_threads();
        std::unique_ptr<float[]> partials(new float[size]), scratch(new float[threads * scratch_size(widest)]);
#pragma omp parallel
        {
#pragma omp for schedule(dynamic, 1)
            for (size_t j = 0; j < items.size(); j++)
                run(items[j], scratch.get() + omp_get_thread_num() * scratch_size(widest),
                    Partial(partials.get() + items[j].at, (items[j].to - items[j].from) * G, Dv));
#pragma omp for schedule(static)
            for (size_t j = 0; j < first.size(); j++)
                finish(first[j], partials.get(), scratch.get() + omp_get_thread_num() * scratch_size(widest));
        }
    }

    // Merges an item's `piece` partials and writes what they come to.
    void finish(const Item &item, float *partials, float *scratch) const {
        const int64_t R = (item.to - item.from) * G;
        const Partial sum(scratch, R, Dv);
        sum.clear(R, Dv);
        for (int64_t z = 0; z < item.piece; z++)
            sum.merge(Partial(partials + item.at + z * Partial::size(R, Dv), R, Dv), R, Dv);
        for (int64_t r = 0; r < R; r++) {
            T *to = out + ((rows[item.row].first + item.from + r / G) * H_kv * G + item.head * G + r % G) * Dv;
            for (int64_t d = 0; d < Dv; d += PAIR)
                store_pair(to + d, load(sum.out + r * Dv + d) / sum.sum[r], load(sum.out + r * Dv + d + LANES) / sum.sum[r]);
        }
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

#define EXPORT(name, T)                                                                                                \
    extern "C" void name(                                                                                              \
        const T *query, int64_t query_head, int64_t query_token, const T *key, int64_t key_head, int64_t key_token,    \
        const T *value, int64_t value_head, int64_t value_token, T *keys, int64_t keys_place, int64_t keys_head,       \
        T *values, int64_t values_place, int64_t values_head, int64_t H_kv, int64_t G, int64_t D, int64_t Dv,          \
        int64_t window, double scaling, const uint8_t *visible, int64_t width, int64_t slots, int64_t M,               \
        const int64_t *token_places, const int64_t *token_slots, const Row *rows, int64_t n, int64_t grid, T *out) {   \
        write(keys, keys_place, keys_head, H_kv, D, key, key_head, key_token, M, token_places, token_slots);           \
        write(values, values_place, values_head, H_kv, Dv, value, value_head, value_token, M, token_places,            \
              token_slots);                                                                                            \
        Attention<T>{query, query_head, query_token, keys, values, keys_place, keys_head, values_place, values_head,   \
                     H_kv, G, D, Dv, window, (float)scaling, rows, n, grid, visible, width, slots, out}                \
            .run();                                                                                                    \
    }

EXPORT(attend_float32, float)
EXPORT(attend_bfloat16, uint16_t)
