// What the instruction sets have in common: the formats, the arguments of the kernels, and the table of kernels
// that each instruction set fills. The numerics are those of perspectron/native/__init__.py and the same, bit for
// bit, whichever table is used.
//
// Shapes: N rows (outputs), K columns (inputs), S = K rounded up to 64, R rows in a block, G groups of 128 columns,
// T tokens.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace perspectron {

enum Format : int { TERNARY, TWO_BIT, FOUR_BIT, INT8, FOUR_BIT_32, EIGHT_BIT_32 };

constexpr int ROWS[] = {5, 4, 2, 1, 16, 16};   // R: rows in a block
constexpr int ZERO[] = {1, 0, 0, 128};         // the code of weight 0 in the formats with one scale a row
constexpr int64_t LINE = 64;                   // columns handled at once
constexpr int64_t GROUP = 128;                 // columns that share a scale and an offset
constexpr bool grouped(Format format) { return format == TWO_BIT || format == FOUR_BIT; }
constexpr bool tiled(Format format) { return format >= FOUR_BIT_32; }  // see tiles.inl
constexpr int64_t TILE_GROUP = 32;             // columns of a tile that share a scale
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Bytes of a tile's scales, which its codes follow.
constexpr int64_t tile_head(Format format, int64_t S) { return format == FOUR_BIT_32 ? S : ceil_div(S / 2, LINE) * LINE; }

struct Matrix {
  const uint8_t* codes;  // [blocks][S]
  const void* scales;    // float [N], or half [blocks][G][2 R]: R scales, then R offsets
  Format format;
  int64_t N, S;
  int64_t G() const { return ceil_div(S, GROUP); }
  int64_t blocks() const { return ceil_div(N, ROWS[format]); }
  int64_t line() const {  // bytes of a block
    return !tiled(format) ? S : tile_head(format, S) + (format == FOUR_BIT_32 ? 8 : 16) * S;
  }
};

struct Tokens {  // quantised activations
  int8_t* q;          // [T][stride], zeros from column K to S
  float* step;        // [T]; NaN where the token is not finite
  int32_t* sum;       // [T]
  int32_t* groupsum;  // [T][G]
  int64_t T, K, S, stride;
  float *steps, *fifteens;  // for tiles, instead of the above, [T][groups] each: the step, −15 Σ q
  int32_t* zeros;           // −128 Σ q
  int64_t groups() const { return S / TILE_GROUP; }
  int64_t G() const { return ceil_div(S, GROUP); }
};

constexpr int64_t SCAN_TOKENS = 16, SCAN_ROWS = 64;  // of a chunk; of a state at once

struct Scan {  // S = γ S + v k, o = S q, over T tokens
  const float *q, *k, *v, *gamma;  // [B][T][R], [B][T][R], [B][T][D], [B][T][D]
  float *state, *o;                // [B][D][R], [B][T][D]
  float* borders;                  // [⌈T / segment⌉][B][D][R], the state before each segment of tokens; null if not wanted
  int64_t B, T, D, R, segment;     // the last of borders, a multiple of SCAN_TOKENS
};

struct ScanBackward {  // of the same
  const float *q, *k, *v, *gamma, *borders, *out;  // as above; the gradient of o
  float *dq, *dk;                                // zeros [⌈D / rows⌉][B][T][R], to be summed
  float *dv, *dgamma, *dstate;                   // [B][T][D] both; [B][D][R], of the last state, becomes that of the first
  int64_t B, T, D, R, rows, segment;  // at most SCAN_ROWS rows
};

struct Memory {  // of N memories, see memory.inl
  const float *q, *k, *v, *e, *b, *alpha;  // [N][T][K], [N][T][V] v, [N][T][A] alpha with A = K or 1; e, b: null if none
                                           // q, k [N / share][T][K]: `share` memories in a row have the same
  float *state, *o;                        // [N][K][V], [N][T][V]; backward, the state before the first token
  const float* out;                        // the gradient of o
  float *dq, *dk, *de, *db, *dalpha;       // zeros [⌈V / 64⌉][N][T][K], dalpha [A], to be summed; of none, unused
  float *dv, *dstate;                      // [N][T][V]; [N][K][V], of the last state, becomes that of the first
  int64_t N, T, K, V, A, share;
};

// Of a training; `g` and the d… are gradients. Types of void are float or bfloat16, all of one call the same.
struct Entropy {  // loss = log Σ e^x − x at the target, of N rows; a target below 0 is left out
  const void* logits;      // [N][V]
  const int64_t* target;   // [N], below V
  float *loss, *total;     // [N]; [N][2], max x and log Σ e^(x − max x)
  void* gradient;          // [N][V]
  float g;
  int64_t V;
};

struct Norm {
  const float *x, *weight;  // [N][D], [D]
  float *y, *r;             // [N][D], [N]
  const float* dy;
  float *dx, *dweight;      // dweight: zeros [⌈N / rows⌉][D], to be summed
  int64_t D, rows;
  float eps;
};

struct Gated {  // y = silu(a) · b
  const void *a, *b;
  void* y;
  const void* dy;
  void *da, *db;
};

struct Gelu {  // y = x · σ(2 √(2/π) (x + 0.044715 x³)), GELU by tanh
  const void* x;
  void* y;
  const void* dy;
  void* dx;
};

struct Decayed {  // γ = σ(p), y = √(1 − γ²) v
  const void *p, *v;
  float *gamma, *y;
  const float *dgamma, *dy;
  void *dp, *dv;
};

struct Shifted {  // y_n = x + (before − x) · mix_n, where `before` is the token before, 0 where a document begins
  const float *x, *last, *mix;  // [B][T][D], [B][D] the token before the first ones, [N][D]
  const uint8_t* reset;         // null or [B][T], 1 where a document begins
  float* const* y;              // N of [B][T][D]
  const float* const* dy;
  float *dx, *dlast, *dmix;     // dlast: zeros [B][D]; dmix: zeros [⌈B T / rows⌉][N][D], to be summed
  int64_t T, D, N, rows;
};

struct Conv {  // y_t = silu(bias + Σ_j weight_j u_{t+j}); S = T + W − 1
  const float *u, *weight, *bias, *sees;  // [B][S][C], [W][C], [C], null or [B][T][W] of 0 and 1
  float* y;                               // [B][T][C]
  const float* dy;
  float *du, *dweight, *dbias;            // zeros: [B][S][C], [B][W][C], [B][C]
  int64_t T, W, C;
};

struct Strides {  // of keys or values, in numbers
  int64_t batch, head, row;
  template <class T>
  const T* at(const void* x, int64_t b, int64_t g, int64_t s) const { return static_cast<const T*>(x) + b * batch + g * head + s * row; }
};

struct Attention {  // o = softmax(scale · q kᵀ) v of each token over the keys from its first to `ahead` + t; G divides H
  const void *q, *k, *v;       // [B][T][H][K], [B][S][G][K], [B][S][G][V]; S is `ahead` + T, 0 + T in training
  const int32_t* first;        // [B][T], in 0 … `ahead` + t
  void* o;                     // [B][T][H][V]
  float* lse;                  // [B][T][H]; null where nobody asks
  const void* out;             // the gradient of o
  void *dq, *dk, *dv;
  int64_t T, H, G, K, V;
  float scale;
  Strides keys, values;
  int64_t ahead = 0;
  bool together = true;        // a task is a key head of B·G; else a head of B·H
};

struct Turn {  // rotary positions of N rows of heads
  const void* x;               // [N][H][K], its rows `stride` numbers apart
  const float *cosine, *sine;  // [N][K / 2]
  void* y;                     // [N][H][K]
  int64_t H, K, stride;
};

// A design's own kernels are one file, which may be missing: its types, its kernels and what Python calls of them.
#define PERSPECTRON_TYPES
#if __has_include("adr.inl")
#include "adr.inl"
#endif
#if __has_include("drm.inl")
#include "drm.inl"
#endif
#undef PERSPECTRON_TYPES

// Of a recorded step, see tape.inl. The codes and kinds are those of perspectron/native/tape.py, in its order.
enum Code : int64_t {
  COPY, FILL, ADD, ADD_SCALAR, MUL, DIV, REMAINDER, FLOOR_DIVIDE, POWER, LEAST, GREATEST, LERP, ADD_PRODUCT, WHERE, EQUAL,
  DIFFERENT, LESS, AT_MOST, BOTH, EITHER, NOT, EXP, LOG, LOG1P, SINE, COSINE, TANH, SIGMOID, SILU, SOFTPLUS, LOG_SIGMOID,
  GELU, GELU_TANH, ROOT, INVERSE_ROOT, INVERSE, MAGNITUDE,
  SUM, NORM, ANY, MOST, FEWEST, SOFTMAX, RMS_NORM, LAYER_NORM, GATHER, SCATTER, CHOLESKY, SOLVE, PRODUCT, ATTEND,
  PACKED, SCAN, SAME
};
enum Kind : int64_t { FLOAT, DOUBLE, LONG, BYTE, BRIEF };  // the last is bfloat16
constexpr int DIMENSIONS = 5;

struct Operand {
  int64_t base, offset, kind;  // which address of a call, and how many bytes after it
  int64_t stride[DIMENSIONS];  // in numbers
};

struct Instruction {
  int64_t code, size[DIMENSIONS];
  double number[3];
  Operand at[6];
};

// A row's tokens before those in the slots of its cache, in pieces of memory that others may read too. Steps are from head
// to head and from token to token, in numbers. As perspectron/native/tape.py lays them out.
struct Piece {
  const void *k, *v;
  int64_t tokens, k_head, k_step, v_head, v_step;
};
struct Before {
  int64_t tokens, count;
  const Piece* piece;
};
inline const Before* before_of(const Instruction& i, void* const* bases, int64_t row) {
  const Operand& at = i.at[5];
  if (at.kind != LONG) return nullptr;
  return reinterpret_cast<const Before*>(static_cast<const char*>(bases[at.base]) + at.offset) + row;
}

struct Kernels {
  const char* name;
  int few;  // up to so many tokens are multiplied straight from the packed codes
  void (*quantise)(const float* x, const Tokens& into, int64_t token);
  void (*quantise_groups)(const float* x, const Tokens& into, int64_t token);  // for tiles
  // y[t][n] of the rows in blocks [first, last); `y` points at row 0 of token 0, `ld` floats a token.
  void (*multiply)(const Matrix&, const Tokens&, int64_t first, int64_t last, float* y, int64_t ld);
  void (*silu)(float* gate, const float* up, int64_t n);  // gate = silu(gate) · up
  void (*scan)(const Scan&, int64_t first, int64_t last);  // rows of all B·D
  void (*scan_backward)(const ScanBackward&, int64_t first, int64_t last);  // slabs of `rows` rows, B·⌈D / rows⌉
  void (*memory)(const Memory&, int64_t first, int64_t last);  // slabs of 64 columns, N·⌈V / 64⌉
  void (*memory_backward)(const Memory&, int64_t first, int64_t last);
  float (*dot_product)(const float* a, const float* b, int64_t n);
  uint64_t (*read)(const uint8_t* bytes, int64_t n);
  double (*dots)(int64_t repeats);  // multiply-adds made, all in registers
  // Rows, numbers or batches [first, last); [0] of float, [1] of bfloat16.
  void (*entropy[2])(const Entropy&, int64_t first, int64_t last);
  void (*entropy_backward[2])(const Entropy&, int64_t first, int64_t last);
  void (*gated[2])(const Gated&, int64_t first, int64_t last);
  void (*gated_backward[2])(const Gated&, int64_t first, int64_t last);
  void (*gelu[2])(const Gelu&, int64_t first, int64_t last);
  void (*gelu_backward[2])(const Gelu&, int64_t first, int64_t last);
  void (*decayed[2])(const Decayed&, int64_t first, int64_t last);
  void (*decayed_backward[2])(const Decayed&, int64_t first, int64_t last);
  void (*attention[2])(const Attention&, int64_t first, int64_t last);  // tasks, see there; backward, key heads of all B·G
  void (*attention_backward[2])(const Attention&, int64_t first, int64_t last);
  void (*turn[2])(const Turn&, int64_t first, int64_t last);
  void (*shifted)(const Shifted&, int64_t first, int64_t last);  // backward: whole multiples of `rows`
  void (*shifted_backward)(const Shifted&, int64_t first, int64_t last);
  void (*norm_rows)(const Norm&, int64_t first, int64_t last);  // backward: whole multiples of `rows`
  void (*norm_backward)(const Norm&, int64_t first, int64_t last);
  void (*convolve)(const Conv&, int64_t first, int64_t last);
  void (*convolve_backward)(const Conv&, int64_t first, int64_t last);
  bool (*tape)(const Instruction&, void* const* bases);  // false for an index that is not there, or other bytes
  void (*tape_product)(const Instruction&, void* const* bases, int64_t first, int64_t last);  // columns
  void (*tape_attend)(const Instruction&, void* const* bases, int64_t first, int64_t last);   // pairs of a row and a key head
#if __has_include("adr.inl")
  void (*gru)(const Gru&, int64_t first, int64_t last);  // pieces of GRU_ROWS memories, G·⌈N / GRU_ROWS⌉
  void (*gru_backward)(const GruBackward&, int64_t first, int64_t last);
#endif
#if __has_include("drm.inl")
  void (*drm)(const Drm&, int64_t first, int64_t last);
  void (*drm_backward)(const DrmBackward&, int64_t first, int64_t last);
#endif
};

extern const Kernels SCALAR;
#ifdef PERSPECTRON_X86
extern const Kernels AVX2, AVX512;
#endif

// Memory of this thread, 64-byte aligned, its contents unspecified; valid until the next call with the same slot.
enum Slot { DENSE, SCALES, SUMS, SCORES, BORDERS, KEYS, SLOTS };
void* scratch(Slot slot, size_t bytes);
template <class T>
T* scratch(Slot slot, int64_t count) {
  return static_cast<T*>(scratch(slot, size_t(count) * sizeof(T)));
}

}  // namespace perspectron
