// A recorded step: instructions on memory that stays where it is, one after another, on one row or a few. What a row of
// the result holds does not depend on the other rows, as long as the recording's shapes are the same.

namespace tape {

constexpr int64_t CHUNK = 256;  // numbers of an operand at a time

inline char* address(const Instruction& i, int operand, void* const* bases) {
  const Operand& o = i.at[operand];
  return static_cast<char*>(bases[o.base]) + o.offset;
}

inline int64_t bytes_of_kind(int64_t kind) { return kind == BYTE ? 1 : kind == BRIEF ? 2 : kind == FLOAT ? 4 : 8; }
inline bool floating(int64_t kind) { return kind == FLOAT || kind == BRIEF; }

inline float float_of(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, 4);
  return y;
}
inline uint16_t brief_of(float x) {
  uint16_t all[16];
  store_brief(all, broadcast(x));
  return all[0];
}
// n numbers `stride` apart as floats in a room.
inline void widened(const uint16_t* from, int64_t stride, int64_t n, float* room) {
  if (stride == 1) sixteens(n, [&](auto at, auto to) ALWAYS { to(room, at(from)); });
  else
    for (int64_t j = 0; j < n; j++) room[j] = float_of(from[j * stride]);
}
inline void narrowed(const float* from, int64_t n, uint16_t* to, int64_t stride) {
  if (stride == 1) sixteens(n, [&](auto at, auto into) ALWAYS { into(to, at(from)); });
  else
    for (int64_t j = 0; j < n; j++) to[j * stride] = brief_of(from[j]);
}
// n numbers of either kind, the same.
inline void floats_from(const void* from, int64_t kind, int64_t stride, int64_t n, float* room) {
  if (kind == BRIEF) return widened(static_cast<const uint16_t*>(from), stride, n, room);
  for (int64_t j = 0; j < n; j++) room[j] = static_cast<const float*>(from)[j * stride];
}
// n numbers that lie together, as they are where they are floats.
inline const float* as_floats(const void* from, int64_t kind, int64_t n, float* room) {
  if (kind != BRIEF) return static_cast<const float*>(from);
  widened(static_cast<const uint16_t*>(from), 1, n, room);
  return room;
}

inline double get_double(const char* p, int64_t kind) {
  switch (kind) {
    case FLOAT: { float x; __builtin_memcpy(&x, p, 4); return x; }
    case DOUBLE: { double x; __builtin_memcpy(&x, p, 8); return x; }
    case LONG: { int64_t x; __builtin_memcpy(&x, p, 8); return double(x); }
    case BRIEF: { uint16_t x; __builtin_memcpy(&x, p, 2); return float_of(x); }
    default: return *reinterpret_cast<const uint8_t*>(p);
  }
}
inline void put_double(char* p, int64_t kind, double x) {
  switch (kind) {
    case FLOAT: { const float y = float(x); __builtin_memcpy(p, &y, 4); break; }
    case DOUBLE: __builtin_memcpy(p, &x, 8); break;
    case LONG: { const int64_t y = int64_t(x); __builtin_memcpy(p, &y, 8); break; }
    case BRIEF: { const uint16_t y = brief_of(float(x)); __builtin_memcpy(p, &y, 2); break; }
    default: *reinterpret_cast<uint8_t*>(p) = x != 0;
  }
}

inline bool whole(int64_t kind) { return kind == LONG || kind == BYTE; }
inline int64_t get_long(const char* p, int64_t kind) {
  if (kind == BYTE) return *reinterpret_cast<const uint8_t*>(p);
  int64_t x;
  __builtin_memcpy(&x, p, 8);
  return x;
}
inline void put_long(char* p, int64_t kind, int64_t x) {
  if (kind == BYTE) *reinterpret_cast<uint8_t*>(p) = x != 0;
  else __builtin_memcpy(p, &x, 8);
}

// f(addresses) at each place of the outer dimensions, all but the last `inner` of five.
template <int operands, class F>
inline ALWAYS void outer(const Instruction& i, void* const* bases, int inner, const F& f) {
  char* p[operands];
  int64_t width[operands], at[DIMENSIONS] = {};
  for (int o = 0; o < operands; o++) p[o] = address(i, o, bases), width[o] = bytes_of_kind(i.at[o].kind);
  const int dims = DIMENSIONS - inner;
  for (int d = 0; d < DIMENSIONS; d++)
    if (i.size[d] == 0) return;
  for (;;) {
    f(p);
    int d = dims - 1;
    for (; d >= 0; d--) {
      for (int o = 0; o < operands; o++) p[o] += i.at[o].stride[d] * width[o];
      if (++at[d] < i.size[d]) break;
      for (int o = 0; o < operands; o++) p[o] -= i.at[o].stride[d] * width[o] * i.size[d];
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

// ---- one number for each place

inline double scalar_map(const Instruction& i, double a, double b, double c) {
  const double s = i.number[0], t = i.number[1];
  switch (i.code) {
    case COPY: return a;
    case FILL: return s;
    case ADD: return a + s * b;
    case ADD_SCALAR: return t * a + s;
    case MUL: return a * b;
    case DIV: return a / b;
    case REMAINDER: { const double r = __builtin_fmod(a, b); return r != 0 && (r < 0) != (b < 0) ? r + b : r; }
    case FLOOR_DIVIDE: return __builtin_floor(a / b);
    case POWER: return __builtin_pow(a, b);
    case LEAST: return a != a || a < b ? a : b;
    case GREATEST: return a != a || a > b ? a : b;
    case LERP: return c < 0.5 ? a + c * (b - a) : b - (1 - c) * (b - a);
    case ADD_PRODUCT: return a + s * b * c;
    case WHERE: return a != 0 ? b : c;
    case EQUAL: return a == b;
    case DIFFERENT: return a != b;
    case LESS: return a < b;
    case AT_MOST: return a <= b;
    case BOTH: return a != 0 && b != 0;
    case EITHER: return a != 0 || b != 0;
    case NOT: return a == 0;
    case EXP: return __builtin_exp(a);
    case LOG: return __builtin_log(a);
    case LOG1P: return __builtin_log1p(a);
    case SINE: return __builtin_sin(a);
    case COSINE: return __builtin_cos(a);
    case TANH: return __builtin_tanh(a);
    case SIGMOID: return 1 / (1 + __builtin_exp(-a));
    case SILU: return a / (1 + __builtin_exp(-a));
    case SOFTPLUS: return a * s > t ? a : __builtin_log1p(__builtin_exp(a * s)) / s;
    case LOG_SIGMOID: return (a < 0 ? a : 0) - __builtin_log1p(__builtin_exp(a < 0 ? a : -a));
    case GELU: return 0.5 * a * (1 + __builtin_erf(a * 0.70710678118654752440));
    case GELU_TANH: return 0.5 * a * (1 + __builtin_tanh(0.79788456080286535588 * (a + 0.044715 * a * a * a)));
    case ROOT: return __builtin_sqrt(a);
    case INVERSE_ROOT: return 1 / __builtin_sqrt(a);
    case INVERSE: return 1 / a;
    case MAGNITUDE: return __builtin_fabs(a);
    default: return __builtin_nan("");
  }
}

// The same of whole numbers, which a double may not hold, modulo 2^64; false where it is left to that.
inline bool whole_map(const Instruction& i, int64_t a, int64_t b, int64_t c, int64_t& y) {
  const auto of = [](int64_t x) { return uint64_t(x); };
  const uint64_t s = of(int64_t(i.number[0])), t = of(int64_t(i.number[1]));
  switch (i.code) {
    case COPY: y = a; break;
    case ADD: y = int64_t(of(a) + s * of(b)); break;
    case ADD_SCALAR: y = int64_t(t * of(a) + s); break;
    case MUL: y = int64_t(of(a) * of(b)); break;
    case ADD_PRODUCT: y = int64_t(of(a) + s * of(b) * of(c)); break;
    case REMAINDER: case FLOOR_DIVIDE: {
      if (b == 0) return false;
      const int64_t d = b == -1 ? int64_t(-of(a)) : a / b, r = b == -1 ? 0 : a % b;  // the least by −1 would trap
      const bool down = r != 0 && (r < 0) != (b < 0);
      y = i.code == REMAINDER ? (down ? r + b : r) : d - down;
      break;
    }
    case POWER:
      if (b < 0) return false;
      for (y = 1; b > 0; b >>= 1, a = int64_t(of(a) * of(a)))
        if (b & 1) y = int64_t(of(y) * of(a));
      break;
    case LEAST: y = a < b ? a : b; break;
    case GREATEST: y = a > b ? a : b; break;
    case WHERE: y = a != 0 ? b : c; break;
    case EQUAL: y = a == b; break;
    case DIFFERENT: y = a != b; break;
    case LESS: y = a < b; break;
    case AT_MOST: y = a <= b; break;
    case MAGNITUDE: y = a < 0 ? int64_t(-of(a)) : a; break;
    default: return false;
  }
  return true;
}

template <class F>
inline void by_one(float* y, const float* x, int64_t n, const F& f) {
  for (int64_t j = 0; j < n; j++) y[j] = f(x[j]);
}

// σ(x), 0 where e^−x is infinite
inline Floats share_of(Floats x) { return chosen(x, broadcast(-FAR), broadcast(0), sigmoid_of(x)); }

// y = f(a, b, c) of n contiguous floats.
inline void float_map(const Instruction& i, float* y, const float* a, const float* b, const float* c, int64_t n) {
  const Floats s = broadcast(float(i.number[0])), one = broadcast(1.0f), minus_one = broadcast(-1.0f);
  const Floats infinite = broadcast(__builtin_inff());
  switch (i.code) {
    case COPY: __builtin_memmove(y, a, size_t(n) * 4); break;
    case FILL: sixteens(n, [&](auto, auto to) ALWAYS { to(y, s); }); break;
    case ADD: made(y, a, b, n, [&](Floats p, Floats q) ALWAYS { return fma(s, q, p); }); break;
    case ADD_SCALAR: {
      const Floats t = broadcast(float(i.number[1]));
      made(y, a, n, [&](Floats p) ALWAYS { return fma(t, p, s); });
      break;
    }
    case MUL: made(y, a, b, n, [](Floats p, Floats q) ALWAYS { return mul(p, q); }); break;
    case DIV: made(y, a, b, n, [](Floats p, Floats q) ALWAYS { return div(p, q); }); break;
    case LERP:
      sixteens(n, [&](auto at, auto to) ALWAYS {
        const Floats p = at(a), q = at(b), w = at(c), apart = minus(q, p);
        to(y, chosen(w, broadcast(0.5f), fma(w, apart, p), minus(q, mul(minus(one, w), apart))));
      });
      break;
    case ADD_PRODUCT:
      sixteens(n, [&](auto at, auto to) ALWAYS { to(y, fma(mul(s, at(b)), at(c), at(a))); });
      break;
    case EXP:  // `exponential` stops at −87 and 88: beyond, e^x = e^(x + 20) e^−20 and e^(x − ¾) e^¾
      made(y, a, n, [&](Floats x) ALWAYS {
        const Floats low = broadcast(-87.0f), high = broadcast(88.0f);
        const Floats by = chosen(x, low, broadcast(20.0f), chosen(high, x, broadcast(-0.75f), broadcast(0)));
        const Floats times = chosen(x, low, broadcast(2.06115362e-9f), chosen(high, x, broadcast(2.11700002f), one));
        return chosen(broadcast(FAR), x, infinite, mul(exponential(add(x, by)), times));
      });
      break;
    case SIGMOID: made(y, a, n, [](Floats x) ALWAYS { return share_of(x); }); break;
    case SILU: made(y, a, n, [](Floats x) ALWAYS { return mul(x, share_of(x)); }); break;
    case TANH: made(y, a, n, [](Floats x) ALWAYS { return tanh_of(x); }); break;
    case ROOT: made(y, a, n, [](Floats x) ALWAYS { return root(x); }); break;
    case INVERSE_ROOT: made(y, a, n, [&](Floats x) ALWAYS { return div(one, root(x)); }); break;
    case INVERSE: made(y, a, n, [&](Floats x) ALWAYS { return div(one, x); }); break;
    case MAGNITUDE: made(y, a, n, [](Floats x) ALWAYS { return magnitude(x); }); break;
    case GREATEST:  // NaN where either is: `greatest` gives its second where it is p, which is not below ∞
      made(y, a, b, n, [&](Floats p, Floats q) ALWAYS { return chosen(p, infinite, greatest(p, q), add(p, magnitude(q))); });
      break;
    case LEAST:
      made(y, a, b, n, [&](Floats p, Floats q) ALWAYS { return chosen(mul(infinite, minus_one), p, least(p, q), minus(p, magnitude(q))); });
      break;
    case GELU: by_one(y, a, n, [](float x) { return 0.5f * x * (1 + __builtin_erff(x * 0.70710678f)); }); break;
    default:
      for (int64_t j = 0; j < n; j++) y[j] = float(scalar_map(i, a[j], b[j], c[j]));
  }
}

inline int operands_of(int64_t code) {  // that are read
  switch (code) {
    case FILL: return 0;
    case ADD: case MUL: case DIV: case REMAINDER: case FLOOR_DIVIDE: case POWER: case LEAST: case GREATEST:
    case EQUAL: case DIFFERENT: case LESS: case AT_MOST: case BOTH: case EITHER: return 2;
    case LERP: case ADD_PRODUCT: case WHERE: return 3;
    default: return 1;
  }
}

void map(const Instruction& i, void* const* bases) {
  const int reads = operands_of(i.code);
  const int64_t n = i.size[DIMENSIONS - 1];
  bool floats = floating(i.at[0].kind), wholes = whole(i.at[0].kind);
  for (int o = 1; o <= reads; o++) floats = floats && floating(i.at[o].kind), wholes = wholes && whole(i.at[o].kind);
  if (!floats) {
    outer<4>(i, bases, 1, [&](char* const* p) {
      for (int64_t j = 0; j < n; j++) {
        double x[3] = {};
        if (int64_t y, given[3] = {}; wholes) {
          for (int o = 0; o < reads; o++) {
            const Operand& read = i.at[o + 1];
            given[o] = get_long(p[o + 1] + j * read.stride[DIMENSIONS - 1] * bytes_of_kind(read.kind), read.kind);
          }
          if (whole_map(i, given[0], given[1], given[2], y)) {
            put_long(p[0] + j * i.at[0].stride[DIMENSIONS - 1] * bytes_of_kind(i.at[0].kind), i.at[0].kind, y);
            continue;
          }
        }
        for (int o = 0; o < reads; o++) {
          const Operand& read = i.at[o + 1];
          x[o] = get_double(p[o + 1] + j * read.stride[DIMENSIONS - 1] * bytes_of_kind(read.kind), read.kind);
        }
        put_double(p[0] + j * i.at[0].stride[DIMENSIONS - 1] * bytes_of_kind(i.at[0].kind), i.at[0].kind, scalar_map(i, x[0], x[1], x[2]));
      }
    });
    return;
  }
  outer<4>(i, bases, 1, [&](char* const* p) {
    float rooms[4][CHUNK];
    for (int64_t from = 0; from < n; from += CHUNK) {
      const int64_t count = n - from < CHUNK ? n - from : CHUNK;
      const float* read[3] = {};
      for (int o = 0; o < reads; o++) {
        const int64_t stride = i.at[o + 1].stride[DIMENSIONS - 1];
        float* room = rooms[o + 1];
        if (i.at[o + 1].kind == BRIEF) {
          widened(reinterpret_cast<const uint16_t*>(p[o + 1]) + from * stride, stride, count, room);
          read[o] = room;
          continue;
        }
        const float* own = reinterpret_cast<const float*>(p[o + 1]) + from * stride;
        read[o] = own;
        if (stride == 1) continue;
        if (stride == 0) {
          const Floats all = broadcast(own[0]);
          sixteens(count, [&](auto, auto to) ALWAYS { to(room, all); });
        } else {
          for (int64_t j = 0; j < count; j++) room[j] = own[j * stride];
        }
        read[o] = room;
      }
      for (int o = reads; o < 3; o++) read[o] = reads > 0 ? read[0] : rooms[0];
      const int64_t stride = i.at[0].stride[DIMENSIONS - 1];
      const bool brief = i.at[0].kind == BRIEF;
      float* into = reinterpret_cast<float*>(p[0]) + (brief ? 0 : from * stride);
      float* y = stride == 1 && !brief ? into : rooms[0];
      if (reads == 0) sixteens(count, [&](auto, auto to) ALWAYS { to(rooms[0], broadcast(0)); });
      float_map(i, y, read[0], read[1], read[2], count);
      if (brief) narrowed(y, count, reinterpret_cast<uint16_t*>(p[0]) + from * stride, stride);
      else if (stride != 1)
        for (int64_t j = 0; j < count; j++) into[j * stride] = y[j];
    }
  });
}

// ---- one number for many places: the dimension before the last is kept, the last is taken together

inline float sum_of_row(const float* x, int64_t stride, int64_t n) {
  if (stride == 1) {
    Floats sum = broadcast(0);
    sixteens(n, [&](auto at, auto) ALWAYS { sum = add(sum, at(x)); });
    return tree(sum);
  }
  float sum = 0;
  for (int64_t j = 0; j < n; j++) sum += x[j * stride];
  return sum;
}

void reduce(const Instruction& i, void* const* bases) {
  const int64_t n = i.size[DIMENSIONS - 1], m = i.size[DIMENSIONS - 2];
  const Operand &into = i.at[0], &from = i.at[1];
  const int64_t y_step = into.stride[DIMENSIONS - 2] * bytes_of_kind(into.kind);
  const int64_t x_step = from.stride[DIMENSIONS - 2] * bytes_of_kind(from.kind), stride = from.stride[DIMENSIONS - 1];
  const double scale = i.number[0];
  outer<2>(i, bases, 2, [&](char* const* p) {
    if (from.kind == FLOAT && (i.code == SUM || i.code == NORM)) {
      if (i.code == SUM && from.stride[DIMENSIONS - 2] == 1 && into.stride[DIMENSIONS - 2] == 1 && into.kind == FLOAT && stride != 1) {
        float* y = reinterpret_cast<float*>(p[0]);  // many sums at once
        const float* x = reinterpret_cast<const float*>(p[1]);
        cleared(y, m);
        for (int64_t j = 0; j < n; j++) add_to(y, x + j * stride, m);
        if (scale != 1) scaled(y, float(scale), y, m);
        return;
      }
      for (int64_t r = 0; r < m; r++) {
        const float* x = reinterpret_cast<const float*>(p[1] + r * x_step);
        float sum;
        if (i.code == NORM) {
          sum = 0;
          if (stride == 1) sum = dot_of(x, x, n);
          else for (int64_t j = 0; j < n; j++) sum += x[j * stride] * x[j * stride];
          sum = __builtin_sqrtf(sum);
        } else {
          sum = sum_of_row(x, stride, n) * float(scale);
        }
        put_double(p[0] + r * y_step, into.kind, sum);
      }
      return;
    }
    const int64_t step = stride * bytes_of_kind(from.kind);
    for (int64_t r = 0; r < m; r++) {
      const char* x = p[1] + r * x_step;
      if (from.kind == LONG && into.kind == LONG) {
        uint64_t y = i.code == SUM ? 0 : uint64_t(get_long(x, LONG));
        for (int64_t j = 0; j < n; j++) {
          const int64_t one = get_long(x + j * step, LONG), other = int64_t(y);
          y = i.code == SUM ? y + uint64_t(one) : uint64_t((i.code == MOST) == (one > other) ? one : other);
        }
        put_long(p[0] + r * y_step, LONG, int64_t(y));
        continue;
      }
      double y = i.code == SUM || i.code == ANY || i.code == NORM ? 0 : get_double(x, from.kind);
      for (int64_t j = 0; j < n; j++) {
        const double one = get_double(x + j * step, from.kind);
        if (i.code == SUM) y += one;
        else if (i.code == NORM) y += one * one;
        else if (i.code == ANY) y = y != 0 || one != 0;
        else if (i.code == MOST) y = y != y || y > one ? y : one;
        else y = y != y || y < one ? y : one;
      }
      put_double(p[0] + r * y_step, into.kind, i.code == SUM ? y * scale : i.code == NORM ? __builtin_sqrt(y) : y);
    }
  });
}

// ---- rows: operands 0 and 1 are rows of the last dimension, contiguous

inline float greatest_of_row(const float* x, int64_t n) {
  Floats top = broadcast(-__FLT_MAX__);
  const int64_t whole = n / 16 * 16;
  sixteens(whole, [&](auto at, auto) ALWAYS { top = greatest(at(x), top); });
  float lanes[16], most = -__FLT_MAX__;
  store(lanes, top);
  for (float lane : lanes) most = lane > most ? lane : most;
  for (int64_t j = whole; j < n; j++) most = x[j] > most ? x[j] : most;
  return most;
}

// y = softmax(x); of −∞ alone NaN, as everywhere
inline void softmax_row(const float* x, float* y, int64_t n) {
  const Floats top = broadcast(-greatest_of_row(x, n)), low = broadcast(-87.0f);
  Floats sum = broadcast(0);
  sixteens(n / 16 * 16, [&](auto at, auto to) ALWAYS {
    const Floats apart = add(at(x), top), e = chosen(apart, low, broadcast(0), exponential(apart));
    sum = add(sum, e);
    to(y, e);
  });
  float total = tree(sum);
  for (int64_t j = n / 16 * 16; j < n; j++) {
    float one[16];
    const Floats apart = add(get(x + j, 1), top);
    store(one, chosen(apart, low, broadcast(0), exponential(apart)));
    y[j] = one[0], total += one[0];
  }
  made(y, y, n, [&](Floats a) ALWAYS { return div(a, broadcast(total)); });
}

void rows(const Instruction& i, void* const* bases) {
  const int64_t n = i.size[DIMENSIONS - 1];
  const float eps = float(i.number[0]);
  const bool brief = i.at[0].kind == BRIEF;
  float* room = scratch<float>(SCALES, 4 * n);
  const float* weight = i.number[1] != 0 ? as_floats(address(i, 2, bases), i.at[2].kind, n, room) : nullptr;
  const float* bias = i.number[2] != 0 ? as_floats(address(i, 3, bases), i.at[3].kind, n, room + n) : nullptr;
  const auto row = [&](float* y, const float* x) {
    if (i.code == SOFTMAX) return softmax_row(x, y, n);
    float mean = 0;
    if (i.code == LAYER_NORM) {
      mean = sum_of_row(x, 1, n) / float(n);
      made(y, x, n, [&](Floats a) ALWAYS { return add(a, broadcast(-mean)); });
      x = y;
    }
    const Floats r = broadcast(1.0f / __builtin_sqrtf(dot_of(x, x, n) / float(n) + eps));
    sixteens(n, [&](auto at, auto to) ALWAYS {
      Floats z = mul(at(x), r);
      if (weight != nullptr) z = mul(z, at(weight));
      if (bias != nullptr) z = add(z, at(bias));
      to(y, z);
    });
  };
  outer<2>(i, bases, 1, [&](char* const* p) {
    float* y = brief ? room + 3 * n : reinterpret_cast<float*>(p[0]);
    row(y, as_floats(p[1], i.at[1].kind, n, room + 2 * n));
    if (brief) narrowed(y, n, reinterpret_cast<uint16_t*>(p[0]), 1);
  });
}

// ---- products: y[b][c][m][n] = number[0] · Σ_k a[b][c][m][k] b[b][c][k][n] + number[1] · bias[b][c][m][n]

struct Sides {
  const float *a, *b;
  int64_t m, n, k, am, ak, bk, bn;
};

// Sums of R rows that lie `step` apart, with one vector.
template <int R, class W>
inline ALWAYS void dots(const W* w, int64_t step, const float* x, int64_t k, float* sums) {
  Floats sum[R];
  unroll<R>([&](auto r) ALWAYS { sum[r] = broadcast(0); });
  sixteens(k, [&](auto at, auto) ALWAYS {
    const Floats one = at(x);
    unroll<R>([&](auto r) ALWAYS { sum[r] = fma(at(w + r * step), one, sum[r]); });
  });
  unroll<R>([&](auto r) ALWAYS { sums[r] = tree(sum[r]); });
}

// y[r · y_w + c · y_x] of each of `rows` rows of w with each of `count` of x.
template <class W>
inline void all_dots(const W* w, int64_t w_step, int64_t rows, const float* x, int64_t x_step, int64_t count, int64_t k,
                     float* y, int64_t y_w, int64_t y_x) {
  constexpr int AT_ONCE = MANY_REGISTERS ? 8 : 4;
  float sums[AT_ONCE];
  int64_t r = 0;
  for (; r + AT_ONCE <= rows; r += AT_ONCE)
    for (int64_t c = 0; c < count; c++) {
      dots<AT_ONCE>(w + r * w_step, w_step, x + c * x_step, k, sums);
      for (int64_t j = 0; j < AT_ONCE; j++) y[(r + j) * y_w + c * y_x] = sums[j];
    }
  for (; r < rows; r++)
    for (int64_t c = 0; c < count; c++) {
      dots<1>(w + r * w_step, w_step, x + c * x_step, k, sums);
      y[r * y_w + c * y_x] = sums[0];
    }
}

// y = Σ_k a[k] b[k][0 … n), its rows bk apart; MORE: added to what y has, with the bits of one sum.
template <bool MORE = false, class W>
inline void sum_rows(const float* a, int64_t ak, const W* b, int64_t bk, int64_t k, int64_t n, float* y) {
  int64_t c = 0;
  for (; c + 64 <= n; c += 64) {
    Floats sum[4];
    unroll<4>([&](auto u) ALWAYS { sum[u] = MORE ? load_floats(y + c + 16 * u) : broadcast(0); });
    for (int64_t j = 0; j < k; j++) {
      const Floats all = broadcast(a[j * ak]);
      unroll<4>([&](auto u) ALWAYS { sum[u] = fma(all, get(b + j * bk + c + 16 * u), sum[u]); });
    }
    unroll<4>([&](auto u) ALWAYS { store(y + c + 16 * u, sum[u]); });
  }
  for (; c < n; c += 16) {
    const int64_t width = n - c < 16 ? n - c : 16;
    Floats sum = !MORE ? broadcast(0) : width == 16 ? get(y + c) : get(y + c, width);
    for (int64_t j = 0; j < k; j++) {
      const W* row = b + j * bk + c;
      sum = fma(broadcast(a[j * ak]), width == 16 ? get(row) : get(row, width), sum);
    }
    if (width == 16) store(y + c, sum);
    else store(y + c, sum, width);
  }
}

// y [m][n], one after another
void multiply_sides(const Sides& p, float* y) {
  if (p.ak == 1 && p.bk == 1) {
    if (p.n >= p.m) all_dots(p.b, p.bn, p.n, p.a, p.am, p.m, p.k, y, 1, p.n);
    else all_dots(p.a, p.am, p.m, p.b, p.bn, p.n, p.k, y, p.n, 1);
  } else if (p.bn == 1) {
    for (int64_t r = 0; r < p.m; r++) sum_rows(p.a + r * p.am, p.ak, p.b, p.bk, p.k, p.n, y + r * p.n);
  } else {
    for (int64_t r = 0; r < p.m; r++)
      for (int64_t c = 0; c < p.n; c++) {
        float sum = 0;
        for (int64_t k = 0; k < p.k; k++) sum += p.a[r * p.am + k * p.ak] * p.b[k * p.bk + c * p.bn];
        y[r * p.n + c] = sum;
      }
  }
}

// Columns [first, last) of y, of a matrix b of bfloat16 whose numbers along k lie together.
void brief_product(const Instruction& i, void* const* bases, int64_t first, int64_t last) {
  const Operand &y = i.at[0], &a = i.at[1], &b = i.at[2], &bias = i.at[3];
  const int64_t m = i.size[2], n = last - first, depth = i.size[4];
  const float s = float(i.number[0]), t = float(i.number[1]);
  float *sums = scratch<float>(DENSE, m * n), *x = scratch<float>(SCALES, m * depth);
  outer<4>(i, bases, 3, [&](char* const* at) {
    const auto from = [&](int operand, const Operand& o, int64_t r, int64_t c) {
      return at[operand] + (r * o.stride[2] + c * o.stride[3]) * bytes_of_kind(o.kind);
    };
    for (int64_t r = 0; r < m; r++) floats_from(from(1, a, r, 0), a.kind, a.stride[4], depth, x + r * depth);
    all_dots(reinterpret_cast<const uint16_t*>(from(2, b, 0, first)), b.stride[3], n, x, depth, m, depth, sums, 1, n);
    for (int64_t r = 0; r < m; r++) {
      float* own = sums + r * n;
      if (s != 1 || t != 0)
        for (int64_t c = 0; c < n; c++)
          own[c] = s * own[c] + (t != 0 ? t * float(get_double(from(3, bias, r, first + c), bias.kind)) : 0);
      char* into = from(0, y, r, first);
      if (y.kind == BRIEF) narrowed(own, n, reinterpret_cast<uint16_t*>(into), y.stride[3]);
      else
        for (int64_t c = 0; c < n; c++) reinterpret_cast<float*>(into)[c * y.stride[3]] = own[c];
    }
  });
}

// Columns [first, last) of y.
void product(const Instruction& i, void* const* bases, int64_t first, int64_t last) {
  const Operand &y = i.at[0], &a = i.at[1], &b = i.at[2], &bias = i.at[3];
  if (b.kind == BRIEF) return brief_product(i, bases, first, last);
  Sides p{nullptr, nullptr, i.size[2], last - first, i.size[4], a.stride[2], a.stride[4], b.stride[4], b.stride[3]};
  const Floats s = broadcast(float(i.number[0])), t = broadcast(float(i.number[1]));
  const bool biased = i.number[1] != 0, plain = !biased && i.number[0] == 1;
  const int64_t step = y.stride[2], bias_step = bias.stride[2];
  const bool direct = plain && y.stride[3] == 1 && (p.m == 1 || step == p.n);
  float* room = direct ? nullptr : scratch<float>(DENSE, p.m * p.n);
  float* spare = scratch<float>(SCALES, p.n);
  outer<4>(i, bases, 3, [&](char* const* at) {
    float* into = reinterpret_cast<float*>(at[0]) + first * y.stride[3];
    p.a = reinterpret_cast<const float*>(at[1]);
    p.b = reinterpret_cast<const float*>(at[2]) + first * b.stride[3];
    const float* offset = reinterpret_cast<const float*>(at[3]) + first * bias.stride[3];
    const bool rowwise = biased && y.stride[3] == 1 && bias.stride[3] == 1;
    if (p.k == 1 && p.bn == 1 && rowwise) {  // a column times a row is added: no sum is made first
      for (int64_t r = 0; r < p.m; r++) {
        const Floats all = mul(s, broadcast(p.a[r * p.am]));
        float* own = into + r * step;
        const float* old = offset + r * bias_step;
        sixteens(p.n, [&](auto get_at, auto put_at) ALWAYS { put_at(own, fma(all, get_at(p.b), mul(t, get_at(old)))); });
      }
      return;
    }
    if (direct) return multiply_sides(p, into);
    multiply_sides(p, room);
    for (int64_t r = 0; r < p.m; r++) {
      const float *row = room + r * p.n, *old = offset + r * bias_step;
      float* own = into + r * step;
      if (rowwise) {
        sixteens(p.n, [&](auto get_at, auto put_at) ALWAYS { put_at(own, fma(s, get_at(row), mul(t, get_at(old)))); });
        continue;
      }
      made(spare, row, p.n, [&](Floats x) ALWAYS { return mul(x, s); });
      for (int64_t c = 0; c < p.n; c++)
        own[c * y.stride[3]] = biased ? spare[c] + float(i.number[1]) * old[c * bias.stride[3]] : spare[c];
    }
  });
}

// ---- attention of one token: out [B][G][h][V], q [B][G][h][K], keys and values [B][G][S][·], length [B]; of i.size
// B, G, h, K, V; number[1] is S, and scores s become c · tanh(s / c) of c = number[2], if that is not 0. Where operand 5
// is there, it has the Before of each row: pieces of memory that hold the tokens before those in the slots. Pairs
// [first, last) of a row and a key head. T: of keys and values.

// f(keys, their step, values, their step, first token, tokens) for each piece of memory with some of the first n tokens.
template <class T, class F>
inline ALWAYS void pieces(const Before* before, int64_t g, const T* k, int64_t k_step, const T* v, int64_t v_step, int64_t n,
                          const F& f) {
  int64_t at = 0;
  for (int64_t p = 0; before != nullptr && p < before->count && at < n; p++) {
    const Piece& own = before->piece[p];
    const int64_t some = own.tokens < n - at ? own.tokens : n - at;
    f(static_cast<const T*>(own.k) + g * own.k_head, own.k_step, static_cast<const T*>(own.v) + g * own.v_head, own.v_step, at,
      some);
    at += some;
  }
  if (at < n) f(k, k_step, v, v_step, at, n - at);
}

template <class T>
void attend_slots(const Instruction& i, void* const* bases, int64_t first, int64_t last) {
  const int64_t G = i.size[1], heads = i.size[2], K = i.size[3], V = i.size[4], S = int64_t(i.number[1]);
  const Operand &o = i.at[0], &q = i.at[1], &k = i.at[2], &v = i.at[3], &filled = i.at[4];
  const float cap = float(i.number[2]);
  float *query = scratch<float>(SCALES, heads * (K + V)), *gathered = query + heads * K;
  const auto from = [&](int operand, const Operand& at, int64_t b, int64_t g, int64_t h) {
    return address(i, operand, bases) + (b * at.stride[0] + g * at.stride[1] + h * at.stride[2]) * bytes_of_kind(at.kind);
  };
  for (int64_t pair = first; pair < last; pair++) {
    const int64_t b = pair / G, g = pair % G;
    const int64_t length = reinterpret_cast<const int64_t*>(address(i, 4, bases))[b * filled.stride[0]];
    const Before* before = before_of(i, bases, b);
    const int64_t most = S + (before == nullptr ? 0 : before->tokens), n = length < 1 ? 1 : length < most ? length : most;
    const T* keys = reinterpret_cast<const T*>(from(2, k, b, g, 0));
    const T* values = reinterpret_cast<const T*>(from(3, v, b, g, 0));
    float* scores = scratch<float>(SCORES, heads * n);
    for (int64_t h = 0; h < heads; h++) floats_from(from(1, q, b, g, h), q.kind, 1, K, query + h * K);
    pieces(before, g, keys, k.stride[2], values, v.stride[2], n,
           [&](const T* own, int64_t step, const T*, int64_t, int64_t at, int64_t some) ALWAYS {
             all_dots(own, step, some, query, K, heads, K, scores + at, 1, n);
           });
    for (int64_t h = 0; h < heads; h++) {
      float* own = scores + h * n;
      char* out = from(0, o, b, g, h);
      scaled(own, float(i.number[0]), own, n);
      if (cap != 0) made(own, own, n, [&](Floats x) ALWAYS { return mul(tanh_of(div(x, broadcast(cap))), broadcast(cap)); });
      softmax_row(own, own, n);
      float* into = o.kind == BRIEF ? gathered : reinterpret_cast<float*>(out);
      pieces(before, g, keys, k.stride[2], values, v.stride[2], n,
             [&](const T*, int64_t, const T* rows, int64_t step, int64_t at, int64_t some) ALWAYS {
               if (at == 0) sum_rows(own, 1, rows, step, some, V, into);
               else sum_rows<true>(own + at, 1, rows, step, some, V, into);
             });
      if (o.kind == BRIEF) narrowed(gathered, V, reinterpret_cast<uint16_t*>(out), 1);
    }
  }
}

void attend_ring(const Instruction& i, void* const* bases, int64_t first, int64_t last) {
  (i.at[2].kind == BRIEF ? attend_slots<uint16_t> : attend_slots<float>)(i, bases, first, last);
}

// ---- the rest

// GATHER: y = from, number[1] places apart along a dimension of number[0] of them, at the index. SCATTER: to there.
// False for an index that is not there.
bool move(const Instruction& i, void* const* bases) {
  const int64_t n = i.size[DIMENSIONS - 1], most = int64_t(i.number[0]), width = bytes_of_kind(i.at[0].kind);
  const int64_t apart = int64_t(i.number[1]) * width, y_step = i.at[0].stride[DIMENSIONS - 1] * width;
  const int64_t x_step = i.at[1].stride[DIMENSIONS - 1] * width, at_step = i.at[2].stride[DIMENSIONS - 1];
  bool there = true;
  outer<3>(i, bases, 1, [&](char* const* p) {
    const int64_t* index = reinterpret_cast<const int64_t*>(p[2]);
    for (int64_t j = 0; j < n; j++) {
      const int64_t at = index[j * at_step];
      if (at < 0 || at >= most) {
        there = false;
        return;
      }
      char* y = p[0] + j * y_step + (i.code == SCATTER ? at * apart : 0);
      const char* x = p[1] + j * x_step + (i.code == GATHER ? at * apart : 0);
      if (at_step == 0 && y_step == width && x_step == width) {
        __builtin_memmove(y, x, size_t(n * width));
        return;
      }
      __builtin_memcpy(y, x, size_t(width));
    }
  });
  return there;
}

// The lower factor of each [n][n], zeros above it; NaN where there is none.
void cholesky(const Instruction& i, void* const* bases) {
  const int64_t n = i.size[DIMENSIONS - 1];
  const Operand &into = i.at[0], &from = i.at[1];
  const int64_t yr = into.stride[DIMENSIONS - 2], yc = into.stride[DIMENSIONS - 1];
  const int64_t xr = from.stride[DIMENSIONS - 2], xc = from.stride[DIMENSIONS - 1];
  outer<2>(i, bases, 2, [&](char* const* p) {
    float* y = reinterpret_cast<float*>(p[0]);
    const float* x = reinterpret_cast<const float*>(p[1]);
    for (int64_t r = 0; r < n; r++)
      for (int64_t c = 0; c < n; c++) {
        if (c > r) {
          y[r * yr + c * yc] = 0;
          continue;
        }
        double sum = x[r * xr + c * xc];
        for (int64_t k = 0; k < c; k++) sum -= double(y[r * yr + k * yc]) * double(y[c * yr + k * yc]);
        y[r * yr + c * yc] = float(r == c ? __builtin_sqrt(sum) : sum / double(y[c * yr + c * yc]));
      }
  });
}

// y = A⁻¹ b of a triangle A [m][m], lower where number[0] is 0, with a diagonal of ones where number[1] is 1; b [m][n].
// The last two sizes are m and n; A's strides are of its rows and columns.
void solve(const Instruction& i, void* const* bases) {
  const int64_t m = i.size[DIMENSIONS - 2], n = i.size[DIMENSIONS - 1];
  const Operand &into = i.at[0], &given = i.at[1], &triangle = i.at[2];
  const auto of = [](const Operand& o, int64_t r, int64_t c) { return r * o.stride[DIMENSIONS - 2] + c * o.stride[DIMENSIONS - 1]; };
  const bool upper = i.number[0] != 0;
  outer<3>(i, bases, 2, [&](char* const* p) {
    float* y = reinterpret_cast<float*>(p[0]);
    const float *b = reinterpret_cast<const float*>(p[1]), *A = reinterpret_cast<const float*>(p[2]);
    for (int64_t c = 0; c < n; c++)
      for (int64_t step = 0; step < m; step++) {
        const int64_t r = upper ? m - 1 - step : step;
        double sum = b[of(given, r, c)];
        for (int64_t k = upper ? r + 1 : 0; k < (upper ? m : r); k++) sum -= double(A[of(triangle, r, k)]) * double(y[of(into, k, c)]);
        y[of(into, r, c)] = float(i.number[1] != 0 ? sum : sum / double(A[of(triangle, r, r)]));
      }
  });
}

// All but products (of floats and packed ones) and attention, which may be shared out.
bool run(const Instruction& i, void* const* bases) {
  switch (i.code) {
    case SUM: case NORM: case ANY: case MOST: case FEWEST: reduce(i, bases); return true;
    case SOFTMAX: case RMS_NORM: case LAYER_NORM: rows(i, bases); return true;
    case GATHER: case SCATTER: return move(i, bases);
    case CHOLESKY: cholesky(i, bases); return true;
    case SOLVE: solve(i, bases); return true;
    case SAME:  // bytes that others were made of, and a copy of them
      return __builtin_memcmp(address(i, 0, bases), address(i, 1, bases), size_t(i.size[DIMENSIONS - 1])) == 0;
    default: map(i, bases); return true;
  }
}

}  // namespace tape
