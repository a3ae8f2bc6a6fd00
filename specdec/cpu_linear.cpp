// y = x w^T + b on a CPU, over weights laid out by specdec/cpu_linear.py, which holds the contract.
//
// All sums are in float32 and run over the input features in order, each in one register lane. A tile is up to ROWS rows
// of x and one panel of COLUMNS columns of y: it stays in registers while the panel is read once, from first to last.

#include <optional>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

constexpr int64_t COLUMNS = PAIR; // of a panel
constexpr int ROWS = 14; // with two registers of sums each, two of weights and one of x, all 32 but one
constexpr int64_t CACHED = 1 << 18; // values of x at a time, which every panel passes over
constexpr int64_t AHEAD = 32; // input features whose weights are fetched early: the processor's own guesses stop at a page

static inline float one(float x) { return x; }
static inline float one(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A panel's weights of one input feature: 32 floats in order, or 32 halves, those of columns c and c + 16 in one word.
static inline void weights(const float *p, Vec &left, Vec &right) {
    __builtin_prefetch(p + AHEAD * COLUMNS);
    __builtin_prefetch(p + AHEAD * COLUMNS + LANES);
    load_pair(p, left, right);
}
static inline void weights(const uint16_t *p, Vec &left, Vec &right) {
    __builtin_prefetch(p + AHEAD * COLUMNS);
    load_pair(p, left, right);
}

// y[rows][COLUMNS] of x[K][rows] and a panel w[K][COLUMNS].
template <int rows, typename T>
static void tile(const float *x, const T *w, int64_t K, const T *bias, T *y, int64_t y_stride) {
    Vec left[rows], right[rows];
    for (int r = 0; r < rows; r++) {
        left[r] = bias ? load(bias) : (Vec){};
        right[r] = bias ? load(bias + LANES) : (Vec){};
    }
    for (int64_t k = 0; k < K; k++) {
        Vec w_left, w_right;
        weights(w + k * COLUMNS, w_left, w_right);
        for (int r = 0; r < rows; r++) {
            left[r] += x[k * rows + r] * w_left;
            right[r] += x[k * rows + r] * w_right;
        }
    }
    for (int r = 0; r < rows; r++) {
        store(y + r * y_stride, left[r]);
        store(y + r * y_stride + LANES, right[r]);
    }
}

template <int rows, typename T>
static void tile_of(int64_t count, const float *x, const T *w, int64_t K, const T *bias, T *y, int64_t y_stride) {
    if (count == rows) return tile<rows>(x, w, K, bias, y, y_stride);
    if constexpr (rows > 1) tile_of<rows - 1>(count, x, w, K, bias, y, y_stride);
}

template <typename T>
static void product(const T *x, int64_t x_stride, const T *w, const T *bias, T *y, int64_t M, int64_t N, int64_t K) {
    const int64_t most = std::max<int64_t>(CACHED / K, ROWS), panels = N / COLUMNS;
    std::vector<float> packed(std::min(M, most) * K);
    for (int64_t done = 0; done < M; done += most) {
        const int64_t m = std::min(most, M - done), tiles = (m + ROWS - 1) / ROWS;
        auto start = [&](int64_t t) { return t * m / tiles; }; // of a tile: they differ by a row at most
#pragma omp parallel
        {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t count = start(t + 1) - start(t);
                for (int64_t r = 0; r < count; r++) {
                    const T *from = x + (done + start(t) + r) * x_stride;
                    for (int64_t k = 0; k < K; k++) packed[start(t) * K + k * count + r] = one(from[k]);
                }
            }
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++)
                for (int64_t t = 0; t < tiles; t++)
                    tile_of<ROWS>(start(t + 1) - start(t), packed.data() + start(t) * K, w + p * K * COLUMNS, K,
                                  bias ? bias + p * COLUMNS : nullptr, y + (done + start(t)) * N + p * COLUMNS, N);
        }
    }
}

using torch::stable::Tensor;

static Tensor linear(Tensor x, Tensor w, std::optional<Tensor> bias) {
    if (x.stride(1) != 1) x = torch::stable::contiguous(x);
    const int64_t M = x.size(0), N = w.size(0) * COLUMNS, K = w.size(1);
    Tensor y = torch::stable::new_empty(x, {M, N});
    auto run = [&](auto type) {
        using T = decltype(type);
        product((const T *)x.const_data_ptr(), x.stride(0), (const T *)w.const_data_ptr(),
                bias ? (const T *)bias->const_data_ptr() : nullptr, (T *)y.mutable_data_ptr(), M, N, K);
    };
    if (x.element_size() == sizeof(float)) run(float());
    else run(uint16_t());
    return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(specdec, library) { library.def("linear(Tensor x, Tensor w, Tensor? bias) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("linear", TORCH_BOX(&linear)); }
