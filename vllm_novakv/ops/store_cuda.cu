// The store in CUDA C++, for compute capability 8.0 and up; formulas in ops/store.py.
//
// Grid (tile of 16 TILES tokens, KV head, 2): the first block of a pair encodes the keys of its tokens, the second their
// values and copies the band. A decode step is a few small tiles, so latency is all that counts; a prompt's chunk is many,
// and larger ones read the tables less often.
//
//   1. the transform, 8 columns a warp, to registers, before the launch ahead has ended; then rows of the tile, centred if
//      keys, to shared memory
//   2. product of both on tensor cores, to shared memory: three bf16 terms of each hold all bits of an f32, and the six
//      products of terms that are not below its precision are taken; values of a half type have fewer terms
//   3. keys    ρ = ‖r‖/√d;  nearest centroids, a warp for neighbouring groups;  least-squares scale;  indices
//      values  s = STEP · RMS(w) in bf16;  codes, a thread for the 8 or 16 codes of a word
//
// Keys, values and band are read and written four elements at a time: their addresses are multiples of that.
//
// Macros: that of cuda_common.cuh, D head size, TILES, WARPS, RESIDENT blocks of a multiprocessor, STEP, BAND_BLOCK.

typedef unsigned long long u64;

#define BF16_MAX 3.3895313892515355e38f

#ifndef EMULATED
// c = a b
__device__ __forceinline__ void product(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
}
#endif
__device__ __forceinline__ void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
  multiply_bf16(c, a.x, a.y, a.z, a.w, b0, b1);
}

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

#define GROUPS (D / 4)
#define PER_WARP (GROUPS / WARPS)
#define TOKENS (16 * TILES)
#define PITCH (D + 4)
// steps of 16 rows of the transform; those whose terms are loaded at once, 6 words a step
#define K_STEPS (D / 16)
#define STEPS (D < 128 ? K_STEPS : 8)
#define LOADS (STEPS * 6 / 4)
#define WORDS ((D + 127) / 128)
#define CODES (D / 8 / WORDS)
#define BLOCK 128

#define THREADS (32 * WARPS)
// groups that a warp searches at the same time: a small tile leaves it waiting
#define AT_ONCE (TILES == 1 ? 2 : 1)
// bf16 terms of a value
#define VALUE_TERMS (3 - TYPE)
// four elements a thread and load
#define ROW_LOADS (TOKENS * D / 4 / THREADS)
#define COLUMN_TILES (D / 8 / WARPS)

#if TYPE == 0
typedef float4 Quad;
#else
typedef ushort4 Quad;
#endif

typedef Number Input;
__device__ __forceinline__ u16 band_element(Input x) {
#if TYPE == 2
  return x;
#else
  const float y = number(x);
  return y == y ? (u16)bf16_bits(y) : 0x7FFF;
#endif
}
__device__ __forceinline__ float row_energy(const float* row, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < D; k += 32) sum += row[k + lane] * row[k + lane];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
  return sum;
}

struct Shared { uint4 (*x)[3][K_STEPS][32]; float (*r)[PITCH]; };

// r = x R, of which TERMS terms of x are not zero
template <int TERMS> __device__ __forceinline__ void transform(const Shared& shared, const uint4* terms, uint4 (&loaded)[LOADS]) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  // not unrolled: registers hold the terms of one load
#pragma unroll 1
  for (int t = 0; t < COLUMN_TILES; t++) {
    // the small products on their own: shorter chains, and no large sum swallows them
    float c[TILES][4], small[TILES][4], smaller[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[tile][i] = small[tile][i] = smaller[tile][i] = 0.0f;
#pragma unroll 1
    for (int part = 0; part < K_STEPS / STEPS; part++) {
      if (t || part)
#pragma unroll
        for (int i = 0; i < LOADS; i++)
          loaded[i] = __ldg(terms + ((t * WARPS * (K_STEPS / STEPS) + part) * LOADS + i) * 32);
#pragma unroll
      for (int k = 0; k < STEPS; k++) {
        u32 b[6];
#pragma unroll
        for (int i = 0; i < 6; i++)
          b[i] = word_of(loaded[(6 * k + i) / 4], (6 * k + i) % 4);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
          const uint4 high = shared.x[tile][0][part * STEPS + k][lane];
          multiply(c[tile], high, b[0], b[1]);
          multiply(small[tile], high, b[2], b[3]);
          multiply(smaller[tile], high, b[4], b[5]);
          if (TERMS > 1) {
            const uint4 middle = shared.x[tile][1][part * STEPS + k][lane];
            multiply(small[tile], middle, b[0], b[1]);
            multiply(smaller[tile], middle, b[2], b[3]);
          }
          if (TERMS > 2) multiply(smaller[tile], shared.x[tile][2][part * STEPS + k][lane], b[0], b[1]);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        shared.r[16 * tile + row + i / 2 * 8][(warp + t * WARPS) * 8 + 2 * quad + i % 2] =
            c[tile][i] + (small[tile][i] + smaller[tile][i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) store_cuda(
    const Input* keys, const Input* values, u8* cache, u16* band, const long long* slots, const long long* band_slots,
    const float* mean, const uint4* key_terms, const u32* words, const uint4* value_terms, int num_slots,
    int key_stride_t, int key_stride_h, int value_stride_t, int value_stride_h, int block_stride_16, int head_stride_16,
    int band_stride_b, int band_stride_h, int band_stride_t) {
  let_next_launch_begin();
  DYNAMIC_SHARED(uint4, memory);
  // a lane's words of A, by tile, term and step; then the transformed rows
  const Shared shared = {(uint4(*)[3][K_STEPS][32])memory, (float(*)[PITCH])(memory + TILES * 3 * K_STEPS * 32)};
  float (*r)[PITCH] = shared.r;
  __shared__ float scale[TOKENS], energies[WARPS][TOKENS], products[WARPS][TOKENS];
  __shared__ long long slot_of[TOKENS], band_slot_of[TOKENS];
  const int h = blockIdx.y, first = blockIdx.x * TOKENS;
  const bool is_keys = blockIdx.z == 0;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  words += (long long)h * GROUPS * 1024;
  // 1. the transform, and what no launch ahead writes
  // [H][D / 8 column tiles][K_STEPS / STEPS][LOADS][32 lanes]
  const uint4* terms =
      (is_keys ? key_terms : value_terms) + ((long long)h * D / 8 + warp) * (K_STEPS / STEPS * LOADS * 32) + lane;
  uint4 loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) loaded[i] = load_ahead(terms + 32 * i);
  float4 own_mean = {0, 0, 0, 0};
  if (is_keys) {
    // a thread has the same elements of every token
    const uint4 bits = load_ahead((const uint4*)(mean + h * D + thread * 4 % D));
    own_mean = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
#pragma unroll
    for (int i = 0; i < GROUPS * 32 / THREADS; i++) prefetch(words + (i * THREADS + thread) * 32);
  }
  wait_for_previous_launch();
  // rows
  const Input* rows = is_keys ? keys + (long long)h * key_stride_h : values + (long long)h * value_stride_h;
  const int row_stride = is_keys ? key_stride_t : value_stride_t;
  Quad elements[ROW_LOADS];
#pragma unroll
  for (int i = 0; i < ROW_LOADS; i++) {
    // rows that are not stored may hold anything: nothing of a row reaches another
    const int place = (i * THREADS + thread) * 4, token = min(first + place / D, num_slots - 1);
    elements[i] = *(const Quad*)(rows + (long long)token * row_stride + place % D);
  }
  // a slot in block 0, vLLM's null block, or below is not stored
  if (thread < TOKENS) {
    const bool is_slot = first + thread < num_slots;
    slot_of[thread] = is_slot ? slots[first + thread] : -1;
    band_slot_of[thread] = is_slot ? band_slots[first + thread] : -1;
  }
#pragma unroll
  for (int i = 0; i < ROW_LOADS; i++) {
    const int place = (i * THREADS + thread) * 4, token = place / D, d = place % D;
    const float own[4] = {number(elements[i].x) - own_mean.x, number(elements[i].y) - own_mean.y,
                          number(elements[i].z) - own_mean.z, number(elements[i].w) - own_mean.w};
    u32 split_own[4][3];
#pragma unroll
    for (int k = 0; k < 4; k++) split(own[k], split_own[k]);
    // words of (token, d) and (token, d + 2)
    u32* word = (u32*)&shared.x[token / 16][0][d / 16][token % 8 * 4 + d % 8 / 2] + token % 16 / 8 + d % 16 / 8 * 2;
#pragma unroll
    for (int term = 0; term < 3; term++)
#pragma unroll
      for (int k = 0; k < 2; k++)
        word[(term * K_STEPS * 32 + k) * 4] = pair(split_own[2 * k][term], split_own[2 * k + 1][term]);
  }
  __syncthreads();
  // 2. r = x R
  if (is_keys) transform<3>(shared, terms, loaded); else transform<VALUE_TERMS>(shared, terms, loaded);
  __syncthreads();
  // 3. scales
#pragma unroll
  for (int t = 0; t < TOKENS / WARPS; t++) {
    const int i = warp + t * WARPS;
    const float norm = sqrtf(row_energy(r[i], lane) / D);
    if (lane == 0) scale[i] = norm;
  }
  __syncthreads();
  const long long head_offset = (long long)h * head_stride_16;

  if (is_keys) {
    float product[2 * TILES], energy[2 * TILES], inverse[2 * TILES];
    u64 packed[2 * TILES];
#pragma unroll
    for (int k = 0; k < 2 * TILES; k++) {
      const float norm = scale[8 * k + row];
      inverse[k] = 1.0f / (norm == 0.0f ? 1.0f : norm);
      product[k] = energy[k] = 0.0f;
      packed[k] = 0;
    }
    for (int of_warp = 0; of_warp < PER_WARP; of_warp += AT_ONCE) {
      const int g = warp * PER_WARP + of_warp;
      float own[AT_ONCE][2 * TILES], x[AT_ONCE][2 * TILES], c[AT_ONCE][2 * TILES];
      int index[AT_ONCE][2 * TILES];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int k = 0; k < 2 * TILES; k++) {
          own[i][k] = r[8 * k + row][4 * (g + i) + quad];
          x[i][k] = own[i][k] * inverse[k];
        }
      nearest<AT_ONCE, TILES>(words + g * 1024, x, lane, index, c);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int k = 0; k < 2 * TILES; k++) {
          product[k] += own[i][k] * c[i][k];
          energy[k] += c[i][k] * c[i][k];
          packed[k] |= (u64)index[i][k] << (8 * (of_warp + i));
        }
    }
    // indices of the warp's groups, side by side
#pragma unroll
    for (int k = 0; k < 2 * TILES; k++) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        product[k] += __shfl_xor_sync(0xFFFFFFFFu, product[k], offset);
        energy[k] += __shfl_xor_sync(0xFFFFFFFFu, energy[k], offset);
      }
      const int token = 8 * k + row;
      const long long slot = slot_of[token];
      if (quad == 0) {
        products[warp][token] = product[k];
        energies[warp][token] = energy[k];
        if (slot >= BLOCK) {
          u8* block = cache + (slot / BLOCK * block_stride_16 + head_offset) * 16;
          u8* place = block + slot % BLOCK * GROUPS + warp * PER_WARP;
#if PER_WARP == 2
          *(u16*)place = (u16)packed[k];
#elif PER_WARP == 4
          *(u32*)place = (u32)packed[k];
#else
          *(u64*)place = packed[k];
#endif
        }
      }
    }
    __syncthreads();
    if (thread < TOKENS && slot_of[thread] >= BLOCK) {
      float sum = 0.0f, norm = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) { sum += products[i][thread]; norm += energies[i][thread]; }
      const long long slot = slot_of[thread];
      u16* plane = (u16*)(cache + (slot / BLOCK * block_stride_16 + head_offset) * 16 + BLOCK * (GROUPS + D / 4));
      plane[scale_element((int)(slot % BLOCK))] = (u16)scale_bits(sum / (norm == 0.0f ? 1.0f : norm));
    }
    return;
  }

  for (int place_of_word = thread; place_of_word < TOKENS * 8 * WORDS; place_of_word += THREADS) {
    const int token = place_of_word / (8 * WORDS), cell = place_of_word % 8, word = place_of_word % (8 * WORDS) / 8;
    const long long slot = slot_of[token];
    const u32 bits = scale_bits(scale[token] * STEP);
    const float inverse = bits == 0 ? 1.0f : 1.0f / __uint_as_float(bits << 16);
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < CODES; i++) {
      const float level = floorf(r[token][(word * CODES + i) * 8 + cell] * inverse) + 2.0f;
      codes |= (u32)(int)fminf(fmaxf(level, 0.0f), 3.0f) << (2 * i);
    }
    if (slot >= BLOCK) {
      u8* block = cache + (slot / BLOCK * block_stride_16 + head_offset) * 16;
      const int place = (int)(slot % BLOCK), p = place % 16;
      const int unit = place / 16 * 128 + p % 8 / 2 * 4 + p % 2 + 2 * (p / 8) + 16 * cell;
#if D == 64
      ((u16*)(block + BLOCK * GROUPS))[unit] = (u16)codes;
#else
      ((u32*)(block + BLOCK * GROUPS))[unit * WORDS + word] = codes;
#endif
      if (cell == 0 && word == 0) ((u16*)(block + BLOCK * (GROUPS + D / 4)))[BLOCK + scale_element(place)] = (u16)bits;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * ROW_LOADS; i++) {
    const int place = (i * THREADS + thread) * 4, token = place / (2 * D), d = place % (2 * D);
    const long long slot = band_slot_of[token];
    if (slot < BAND_BLOCK) continue;
    const Input* source = d < D ? keys + (long long)(first + token) * key_stride_t + (long long)h * key_stride_h + d
                                : values + (long long)(first + token) * value_stride_t + (long long)h * value_stride_h + d - D;
    const Quad element = *(const Quad*)source;
    const ushort4 rounded = {band_element(element.x), band_element(element.y), band_element(element.z), band_element(element.w)};
    *(ushort4*)(band + slot / BAND_BLOCK * band_stride_b + (long long)h * band_stride_h + slot % BAND_BLOCK * band_stride_t +
                d) = rounded;
  }
}
