// Running a recorded step.

namespace {

constexpr int64_t WORTH_SHARING = int64_t(1) << 19;  // multiply-adds: some 50 µs of reading weights

char* place(const Instruction& i, int operand, void* const* bases) {
  return static_cast<char*>(bases[i.at[operand].base]) + i.at[operand].offset;
}

}  // namespace

// 0, or 1 + the number of the instruction whose index is not there, or whose bytes are not the same.
API int64_t pspx_tape(const void* tape, int64_t count, void* const* bases, int threads) {
  const Kernels& k = kernels();
  const Instruction* all = static_cast<const Instruction*>(tape);
  Tokens tokens{};  // as they were quantised last in this call, and what of
  const float* read = nullptr;
  for (int64_t at = 0; at < count; at++) {
    const Instruction& i = all[at];
    if (i.code == PRODUCT) {
      const int64_t columns = i.size[3], work = i.size[2] * i.size[3] * i.size[4];
      const int64_t batches = i.size[0] * i.size[1];
      const bool split = batches == 1 && columns >= 2 * threads * 16 && work >= WORTH_SHARING;
      const int64_t grain = split ? ceil_div(ceil_div(columns, threads), 16) * 16 : columns;
      shared(split ? threads : 1, columns, grain, [&](int64_t first, int64_t last) { k.tape_product(i, bases, first, last); });
    } else if (i.code == ATTEND) {
      const int64_t pairs = i.size[0] * i.size[1], work = i.size[2] * (i.size[3] + i.size[4]) * pairs;
      const Operand& filled = i.at[4];
      const int64_t* length = reinterpret_cast<const int64_t*>(static_cast<const char*>(bases[filled.base]) + filled.offset);
      int64_t longest = 0;
      for (int64_t b = 0; b < i.size[0]; b++) {
        const Before* before = before_of(i, bases, b);
        const int64_t most = int64_t(i.number[1]) + (before == nullptr ? 0 : before->tokens), n = length[b * filled.stride[0]];
        longest = n > longest ? (n < most ? n : most) : longest;
      }
      shared(work * longest >= WORTH_SHARING ? threads : 1, pairs, 1,
             [&](int64_t first, int64_t last) { k.tape_attend(i, bases, first, last); });
    } else if (i.code == PACKED) {  // y [T][N] = x [T][K] Wᵀ, of size[2 … 4]; the codes, the scales; number[0] is the format
      const float* x = reinterpret_cast<const float*>(place(i, 1, bases));
      const int64_t T = i.size[2], N = i.size[3], K = i.size[4];
      const bool again = i.number[1] != 0 && x == read;  // number[1]: as they were for the packed product before
      const Format format = Format(int(i.number[0]));
      if (!again) tokens = tokens_in_scratch(0, T, K, format);
      const Matrix m = matrix(reinterpret_cast<const uint8_t*>(place(i, 2, bases)), place(i, 3, bases), format, N, K);
      multiply_all(k, x, tokens, again, m, reinterpret_cast<float*>(place(i, 0, bases)), threads);
      read = x;
    } else if (i.code == SCAN) {  // o, q, k, v, gamma, state of B, D and R in size[2 … 4]
      const auto at = [&](int operand) { return reinterpret_cast<float*>(place(i, operand, bases)); };
      pspx_scan(at(1), at(2), at(3), at(4), at(5), at(0), nullptr, i.size[2], 1, i.size[3], i.size[4], SCAN_TOKENS, threads);
    } else if (!k.tape(i, bases)) {
      return 1 + at;
    }
  }
  return 0;
}
