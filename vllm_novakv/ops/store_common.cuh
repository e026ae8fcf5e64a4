// What the two kernels of the store share: types, tensor-core products, nearest centroids, bf16 rounding, the place of a
// scale.
//
// Lane = 4 row + quad, as in tensor-core fragments. m16n8k16 takes two neighbouring elements in a word: A at (row, 2 quad),
// (row + 8, 2 quad), (row, 2 quad + 8), (row + 8, 2 quad + 8), B at (2 quad, row), (2 quad + 8, row), and gives C at
// (row, 2 quad), (row, 2 quad + 1), (row + 8, 2 quad), (row + 8, 2 quad + 1).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define BF16_MAX 3.3895313892515355e38f

#ifndef EMULATED
// c += a b, m16n8k16 of bf16
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// c = a b
__device__ __forceinline__ void product(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }
#endif

// x as three bf16 terms, which hold all of its bits, each in the upper half of a word
__device__ __forceinline__ void split(float x, u32 (&terms)[3]) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
    terms[i] = __float_as_uint(x) & 0xFFFF0000;
    x -= __uint_as_float(terms[i]);
  }
}
// upper halves of two words, side by side
__device__ __forceinline__ u32 pair(u32 low, u32 high) { return __byte_perm(low, high, 0x7632); }

// Nearest centroids of N groups, four elements each, for 16 M rows: the largest x·c − ‖c‖²/2, the first of equals.
//
// The scores of 16 rows against 8 centroids of a group are one product with k = 16: of every element, x in three bf16
// terms, which are all of an f32's bits, against c, which is exact in bf16; and 1 against −‖c‖²/2 in three bf16 terms. The
// maximum is kept of pairs of centroids 2 p, 2 p + 1, which a lane holds side by side; the better of a pair is found last.
//
//   words    [N][8][32][4]: word [g][i][lane][j] of centroid 8 (4 i + j) + row: element quad, then term quad
//   x        of lane's rows, row + 8 k, element quad of every group
//   index    nearest centroid, in all lanes of a row
//   element  its element quad
template <int N, int M>
__device__ __forceinline__ void nearest(const u32* words, const float (&x)[N][2 * M], int lane,
                                        int (&index)[N][2 * M], float (&element)[N][2 * M]) {
  const int quad = lane % 4;
  uint4 a[N][M];
  float best[N][2 * M];
#pragma unroll
  for (int g = 0; g < N; g++)
#pragma unroll
    for (int k = 0; k < 2 * M; k++) {
      u32 terms[3];
      split(x[g][k], terms);
      u32& first = k % 2 ? a[g][k / 2].y : a[g][k / 2].x;
      u32& second = k % 2 ? a[g][k / 2].w : a[g][k / 2].z;
      first = pair(terms[0], terms[1]);
      second = pair(terms[2], quad < 3 ? 0x3F800000 : 0);
      best[g][k] = __int_as_float(0xFF800000);
      index[g][k] = 0;
    }
  const uint4* loads = (const uint4*)words + lane;
#pragma unroll 2
  for (int i = 0; i < 8; i++, loads += 32)
#pragma unroll
    for (int g = 0; g < N; g++) {
      const uint4 loaded = __ldg(loads + 256 * g);
      const u32 b[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int tile = 0; tile < M; tile++) {
          float c[4];
          product(c, a[g][tile], __byte_perm(b[j], 0, 0x1010), b[j]);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float score = fmaxf(c[2 * half], c[2 * half + 1]);
            const int k = 2 * tile + half;
            if (score > best[g][k]) { best[g][k] = score; index[g][k] = 16 * i + 4 * j; }
          }
        }
    }
#pragma unroll
  for (int g = 0; g < N; g++)
#pragma unroll
    for (int k = 0; k < 2 * M; k++) {
      int p = index[g][k] + quad;
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, best[g][k], offset);
        const int other_p = __shfl_xor_sync(0xFFFFFFFFu, p, offset);
        const bool is_better = other > best[g][k] || (other == best[g][k] && other_p < p);
        best[g][k] = is_better ? other : best[g][k];
        p = is_better ? other_p : p;
      }
      float score[2], c[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int n = p / 4, row = p % 4 * 2 + i;
        const u32 word = __ldg(words + 1024 * g + n / 4 * 128 + (4 * row + quad) * 4 + n % 4);
        c[i] = __uint_as_float(word << 16);
        score[i] = x[g][k] * c[i] + __uint_as_float(word & 0xFFFF0000);
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2) score[i] += __shfl_xor_sync(0xFFFFFFFFu, score[i], offset);
      }
      const bool is_second = score[1] > score[0];
      index[g][k] = 2 * p + is_second;
      element[g][k] = is_second ? c[1] : c[0];
    }
}

// bits of x rounded to bf16, to nearest even
__device__ __forceinline__ u32 bf16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
// the same of a scale, which stays finite
__device__ __forceinline__ u32 scale_bits(float x) { return bf16_bits(fminf(fmaxf(x, -BF16_MAX), BF16_MAX)); }
// element of a token in its block's scale planes
__device__ __forceinline__ int scale_element(int p) { return p / 64 * 64 + p % 8 * 8 + p % 64 / 8; }

