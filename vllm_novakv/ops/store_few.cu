// The whole store of few tokens in one launch, for compute capability 8.0 and up; formulas in ops/store.py.
//
// Grid (tile of 16 tokens, KV head, 2): the first block of a pair encodes the keys of its tokens, the second their values
// and copies the band. A decode step is a few such tiles, so latency is all that counts:
//
//   1. rows of the tile, centred if keys, to shared memory; the transform, 8 columns a warp, to registers meanwhile
//   2. product of both on tensor cores, to shared memory: three bf16 terms of each hold all bits of an f32, and the six
//      products of terms that are not below its precision are taken
//   3. keys    ρ = ‖r‖/√d;  nearest centroids, a warp for neighbouring groups;  least-squares scale;  indices
//      values  s = STEP · RMS(w) in bf16;  codes, a thread for the 8 or 16 codes of a word
//
// Keys, values and band are read and written four elements at a time: their addresses are multiples of that.
//
// Macros: D head size, WARPS, TYPE of keys and values (0 f32, 1 f16, 2 bf16), STEP, BAND_BLOCK.

#define GROUPS (D / 4)
#define PER_WARP (GROUPS / WARPS)
#define TOKENS 16
#define PITCH (D + 4)
// steps of 16 rows of the transform; those whose terms are loaded at once, 6 words a step
#define K_STEPS (D / 16)
#define STEPS (D < 128 ? K_STEPS : 8)
#define LOADS (STEPS * 6 / 4)
#define WORDS ((D + 127) / 128)
#define CODES (D / 8 / WORDS)
#define BLOCK 128

#define THREADS (32 * WARPS)
// four elements a thread and load
#define ROW_LOADS (TOKENS * D / 4 / THREADS)
#define COLUMN_TILES (D / 8 / WARPS)

#if TYPE == 0
typedef float Input;
typedef float4 Quad;
#else
typedef u16 Input;
typedef ushort4 Quad;
#endif

#ifndef EMULATED
__device__ __forceinline__ float of_half(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
#endif

__device__ __forceinline__ float number(Input x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return of_half(x);
#else
  return __uint_as_float((u32)x << 16);
#endif
}
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

extern "C" __global__ void __launch_bounds__(32 * WARPS) store_few(
    const Input* keys, const Input* values, u8* cache, u16* band, const long long* slots, const long long* band_slots,
    const float* mean, const uint4* key_terms, const u32* words, const uint4* value_terms, int num_slots,
    int key_stride_t, int key_stride_h, int value_stride_t, int value_stride_h, int block_stride_16, int head_stride_16,
    int band_stride_b, int band_stride_h, int band_stride_t) {
  // a lane's words of A, by term and step
  __shared__ uint4 x[3][K_STEPS][32];
  __shared__ float r[TOKENS][PITCH], scale[TOKENS], energies[WARPS][TOKENS], products[WARPS][TOKENS];
  __shared__ long long slot_of[TOKENS], band_slot_of[TOKENS];
  const int h = blockIdx.y, first = blockIdx.x * TOKENS;
  const bool is_keys = blockIdx.z == 0;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  words += (long long)h * GROUPS * 1024;
  // 1. rows and transform: every load is on its way before the first is used
  if (is_keys)
#pragma unroll
    for (int i = 0; i < GROUPS * 32 / THREADS; i++) prefetch(words + (i * THREADS + thread) * 32);
  const Input* rows = is_keys ? keys + (long long)h * key_stride_h : values + (long long)h * value_stride_h;
  const int row_stride = is_keys ? key_stride_t : value_stride_t;
  Quad elements[ROW_LOADS];
#pragma unroll
  for (int i = 0; i < ROW_LOADS; i++) {
    // rows that are not stored may hold anything: nothing of a row reaches another
    const int place = (i * THREADS + thread) * 4, token = min(first + place / D, num_slots - 1);
    elements[i] = *(const Quad*)(rows + (long long)token * row_stride + place % D);
  }
  // [H][D / 8 column tiles][K_STEPS / STEPS][LOADS][32 lanes]
  const uint4* terms =
      (is_keys ? key_terms : value_terms) + ((long long)h * D / 8 + warp) * (K_STEPS / STEPS * LOADS * 32) + lane;
  uint4 loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) loaded[i] = __ldg(terms + 32 * i);
  // a slot in block 0, vLLM's null block, or below is not stored
  if (thread < TOKENS) {
    const bool is_slot = first + thread < num_slots;
    slot_of[thread] = is_slot ? slots[first + thread] : -1;
    band_slot_of[thread] = is_slot ? band_slots[first + thread] : -1;
  }
#pragma unroll
  for (int i = 0; i < ROW_LOADS; i++) {
    const int place = (i * THREADS + thread) * 4, token = place / D, d = place % D;
    float own[4] = {number(elements[i].x), number(elements[i].y), number(elements[i].z), number(elements[i].w)};
    if (is_keys) {
      const float4 own_mean = __ldg((const float4*)(mean + h * D + d));
      own[0] -= own_mean.x; own[1] -= own_mean.y; own[2] -= own_mean.z; own[3] -= own_mean.w;
    }
    u32 split_own[4][3];
#pragma unroll
    for (int k = 0; k < 4; k++) split(own[k], split_own[k]);
    // words of (token, d) and (token, d + 2)
    u32* word = (u32*)&x[0][d / 16][token % 8 * 4 + d % 8 / 2] + token / 8 + d % 16 / 8 * 2;
#pragma unroll
    for (int term = 0; term < 3; term++)
#pragma unroll
      for (int k = 0; k < 2; k++)
        word[(term * K_STEPS * 32 + k) * 4] = pair(split_own[2 * k][term], split_own[2 * k + 1][term]);
  }
  __syncthreads();
  // 2. r = x R
  // not unrolled: registers hold the terms of one load
#pragma unroll 1
  for (int t = 0; t < COLUMN_TILES; t++) {
    // the small products on their own: shorter chains, and no large sum swallows them
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f}, small[4] = {0.0f, 0.0f, 0.0f, 0.0f}, smaller[4] = {0.0f, 0.0f, 0.0f, 0.0f};
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
        for (int i = 0; i < 6; i++) {
          const uint4& own = loaded[(6 * k + i) / 4];
          b[i] = (6 * k + i) % 4 == 0 ? own.x : (6 * k + i) % 4 == 1 ? own.y : (6 * k + i) % 4 == 2 ? own.z : own.w;
        }
        const uint4 high = x[0][part * STEPS + k][lane], middle = x[1][part * STEPS + k][lane];
        const uint4 low = x[2][part * STEPS + k][lane];
        multiply(c, high, b[0], b[1]);
        multiply(small, high, b[2], b[3]);
        multiply(small, middle, b[0], b[1]);
        multiply(smaller, high, b[4], b[5]);
        multiply(smaller, middle, b[2], b[3]);
        multiply(smaller, low, b[0], b[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      r[row + i / 2 * 8][(warp + t * WARPS) * 8 + 2 * quad + i % 2] = c[i] + (small[i] + smaller[i]);
  }
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
    float product[2] = {0.0f, 0.0f}, energy[2] = {0.0f, 0.0f}, inverse[2];
    u32 packed[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float norm = scale[8 * half + row];
      inverse[half] = 1.0f / (norm == 0.0f ? 1.0f : norm);
    }
    // two groups at a time, so that one computes while the other waits
#pragma unroll
    for (int of_warp = 0; of_warp < PER_WARP; of_warp += 2) {
      const int g = warp * PER_WARP + of_warp;
      float own[2][2], x[2][2], c[2][2];
      int index[2][2];
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          own[i][half] = r[8 * half + row][4 * (g + i) + quad];
          x[i][half] = own[i][half] * inverse[half];
        }
      nearest<2, 1>(words + g * 1024, x, lane, index, c);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          product[half] += own[i][half] * c[i][half];
          energy[half] += c[i][half] * c[i][half];
          packed[half] |= (u32)index[i][half] << (8 * (of_warp + i));
        }
    }
    // indices of the warp's groups, side by side
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        product[half] += __shfl_xor_sync(0xFFFFFFFFu, product[half], offset);
        energy[half] += __shfl_xor_sync(0xFFFFFFFFu, energy[half], offset);
      }
      const int token = 8 * half + row;
      const long long slot = slot_of[token];
      if (quad == 0) {
        products[warp][token] = product[half];
        energies[warp][token] = energy[half];
        if (slot >= BLOCK) {
          u8* block = cache + (slot / BLOCK * block_stride_16 + head_offset) * 16;
          u8* place = block + slot % BLOCK * GROUPS + warp * PER_WARP;
#if PER_WARP == 2
          *(u16*)place = (u16)packed[half];
#else
          *(u32*)place = packed[half];
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

  if (thread < TOKENS * 8 * WORDS) {
    const int token = thread / (8 * WORDS), cell = thread % 8, word = thread % (8 * WORDS) / 8;
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
