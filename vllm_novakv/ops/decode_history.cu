// History part of paged decode for compute capability 8.9 and up: the second launch of ops/paged_decode.py, same
// inputs and same outputs as its Triton kernel.
//
// Grid (split, KV head, request), 4 warps. The head's codebook, one 32-bit word of four 8-bit floats per centroid, lies
// in shared memory. A warp takes 64 tokens at a time, 16 to a tensor-core tile, and keeps its own online softmax:
//
//     logits^T [16 tokens, 8 heads] = K [16, D] Q^T [D, 8]      K from shared memory straight into the A fragment
//     O^T      [16 dims, 8 heads]  += V^T [16, 16 tokens] W^T   V from one 16-byte load straight into the A fragment
//
// Lane = 4 row + quad. For m16n8k16 a lane holds k = 2 quad, 2 quad + 1 and both + 8: these four are the elements of
// group 4 step + quad. Weights go from the first product's C fragment to the second's B fragment by transposing 8x8 tiles
// (movmatrix).
//
// What limits the kernel is the number of instructions, so the inner loop has few:
//   - an index's address in the codebook is one dot product of bytes (dp4a): 4 · byte quad of a word + base
//   - a value code x at bits 2j of a half-word is read where it lies, as the subnormal fp16 number x · 2^(2j − 24): one
//     AND; the powers of two are taken out at the end, the −1.5 of x − 1.5 with the sum of weights, which is one more
//     row of the product, now and then, so that no sum grows to where the products' truncation shows
//   - the maximum is shared among lanes, and the output rescaled, only when some lane has a larger one
//
// Macros: D head size, E5M2 type of the centroids, SINK, RECENT, PROMPT_RECENT, BAND_BLOCK, ROWS query rows in memory,
// HAS_CAP, RESIDENT blocks of a multiprocessor.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define GROUPS (D / 4)
#define STEPS (D / 16)
#define SETS (D / 64)
#define TILES (D / 16)
#define WARPS 4
#define CENTRED_CHUNKS 8
#define MASKED (-1.0e30f)
#define LOG2E 1.4426950408889634f
#define ONES 0x3C003C00u

#ifndef EMULATED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float log2_fast(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b, u32 c) {
  u32 y; asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c)); return y;
}
__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 y; asm("ld.shared.u32 %0, [%1];" : "=r"(y) : "r"(address)); return y;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 transpose(u32 x) {
  u32 y; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y;
}
template <int EXPONENT_BITS> __device__ __forceinline__ void unpack_bytes(u32 word, u32& low, u32& high) {
  if (EXPONENT_BITS == 5)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e5m2x2 %0, l; cvt.rn.f16x2.e5m2x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word));
  else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word));
}
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif
// Code j of two tokens' half-words of 8 codes as subnormal fp16 pair x · 2^(place − 24): place(j) bits up.
__device__ __forceinline__ int code_place(int j) { return j < 5 ? 2 * j : 2 * j - 10; }
__device__ __forceinline__ u32 value_pair(u32 codes, u32 upper_codes, int j) {
  return (j < 5 ? codes : upper_codes) & (0x00030003u << code_place(j));
}
// of a dimension of output tile i: it holds codes 2 (i mod 4) and the next one of its set
__device__ __forceinline__ int code_place_of(int i, int k) { return code_place(2 * (i % 4) + k / 2); }
// Σ w x 2^(place − 24) becomes Σ w (x − 1.5) 2^(place − 24).
__device__ __forceinline__ void centre(float (&out)[TILES][4], float (&value_total)[4]) {
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      out[i][k] -= 1.5f * __int_as_float((127 - 24 + code_place_of(i, k)) << 23) * value_total[k % 2];
#pragma unroll
  for (int k = 0; k < 4; k++) value_total[k] = 0.0f;
}
__device__ __forceinline__ float bf16_of(u32 word, int i) { return __int_as_float(i ? word & 0xFFFF0000u : word << 16); }
__device__ __forceinline__ float soft_cap(float x, float cap) {
  return cap * (1.0f - 2.0f / (exp2_fast(x * (2.0f * LOG2E / cap)) + 1.0f));
}

__device__ __forceinline__ float log2_scale(float s) { return fminf(log2_fast(fmaxf(s, 7.9e-31f)), 100.0f); }
// logits of a token's two heads, and the largest logit + log2 s of each
__device__ __forceinline__ void scale_logits(float* x, float rho, float log2_s, const float (&row_scale)[2],
                                             const float (&row_offset)[2], float cap, float (&top)[2]) {
#pragma unroll
  for (int k = 0; k < 2; k++) {
    x[k] = x[k] * (rho * row_scale[k]) + row_offset[k];
#if HAS_CAP
    x[k] = soft_cap(x[k], cap) * LOG2E;
#endif
    top[k] = fmaxf(top[k], x[k] + log2_s);
  }
}

struct Indices { uint4 v[2][(GROUPS + 15) / 16]; };

__device__ __forceinline__ void load_indices(Indices& x, const u8* block, int token) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int i = 0; i < GROUPS / 16; i++)
      x.v[half][i] = __ldg((const uint4*)(block + (token + 8 * half) * GROUPS) + i);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) decode_history(
    const u16* folded, const float* row_scales, const u8* cache, const u32* table, const int* block_table,
    const int* band_table, const int* seq_lens, const int* prompt_lens, float* partial, float* weights,
    int block_stride_16, int head_stride_16, int block_table_stride, int band_table_stride, int num_parts, int scale_bits,
    int cap_bits) {
  DYNAMIC_SHARED(u32, book);
  const int splits = gridDim.x, split = blockIdx.x, h = blockIdx.y, r = blockIdx.z;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  const int seq_len = seq_lens[r], window = seq_len <= prompt_lens[r] ? PROMPT_RECENT : RECENT;
  const int share = ((seq_len + splits - 1) / splits + 127) / 128 * 128;
  const int start = split * share, end = min(start + share, seq_len);
  const long long pair = (long long)r * gridDim.y + h, part = pair * num_parts + split;
  float* part_weights = weights + part * 2 * ROWS;
  if (start >= end) {
    if (thread < ROWS) { part_weights[thread] = MASKED; part_weights[ROWS + thread] = 0.0f; }
    return;
  }
  {
    const uint4* source = (const uint4*)(table + (long long)h * GROUPS * 256);
    for (int i = thread; i < GROUPS * 64; i += 128) ((uint4*)book)[i] = __ldg(source + i);
  }
  // B fragments of the query: heads in columns
  u32 q[STEPS][2];
#pragma unroll
  for (int step = 0; step < STEPS; step++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u16* plane = folded + pair * ROWS * D + (2 * i * ROWS + row) * GROUPS + 4 * step + quad;
      q[step][i] = (u32)plane[0] | ((u32)plane[ROWS * GROUPS] << 16);
    }
  const float scale = __int_as_float(scale_bits), cap = __int_as_float(cap_bits);
#if HAS_CAP
  const float to_log2 = 1.0f;
#else
  const float to_log2 = LOG2E;
#endif
  float row_scale[2], row_offset[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    row_scale[i] = row_scales[pair * 2 * ROWS + 2 * quad + i] * scale * to_log2;
    row_offset[i] = row_scales[pair * 2 * ROWS + ROWS + 2 * quad + i] * scale * to_log2;
  }
  __syncthreads();

  float m[2] = {MASKED, MASKED}, total[2] = {0, 0};
  float out[TILES][4], value_total[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) out[i][k] = 0.0f;

  const int* blocks = block_table + (long long)r * block_table_stride;
  const int* band_blocks = band_table + (long long)r * band_table_stride;
  const u8* head_cache = cache + (long long)h * head_stride_16 * 16;
  const u32 lane_book = shared_address(book) + quad * 1024, lane_byte = 4u << (8 * quad);

  int chunk = start + 64 * warp;
  const u8* block = chunk < end ? head_cache + (long long)blocks[chunk >> 7] * block_stride_16 * 16 : head_cache;
  // a tile's indices are loaded while the tile before it is computed
  Indices indices[2];
  if (chunk < end) load_indices(indices[0], block, (chunk & 127) + row);
  while (chunk < end) {
    const int first = (chunk & 127);
    const int following = chunk + 64 * WARPS;
    const u8* next_block = following < end ? head_cache + (long long)blocks[following >> 7] * block_stride_16 * 16 : block;
    // scales of the lane's 8 tokens: row + 8 i
    const u8* planes = block + 128 * (GROUPS + D / 4) + first * 2 + row * 16;
    uint4 rho4 = __ldg((const uint4*)planes), s4 = __ldg((const uint4*)(planes + 256));
    // value cells of the chunk's four tiles
    u32 cells[4][D / 32];
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      const u8* values = block + 128 * GROUPS + ((first >> 4) + tile) * (4 * D) + lane * (D / 8);
#if D == 64
      const uint2 x = __ldg((const uint2*)values);
      cells[tile][0] = x.x; cells[tile][1] = x.y;
#else
#pragma unroll
      for (int i = 0; i < D / 128; i++) {
        const uint4 x = __ldg((const uint4*)values + i);
        cells[tile][4 * i] = x.x; cells[tile][4 * i + 1] = x.y; cells[tile][4 * i + 2] = x.z; cells[tile][4 * i + 3] = x.w;
      }
#endif
    }
    // 1. logits
    float c[4][4];
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      if (tile < 3) load_indices(indices[(tile + 1) % 2], block, first + 16 * (tile + 1) + row);
      else if (following < end) load_indices(indices[0], next_block, (following & 127) + row);
#pragma unroll
      for (int k = 0; k < 4; k++) c[tile][k] = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        u32 a[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint4 v = indices[tile % 2].v[half][step / 4];
          const u32 word = step % 4 == 0 ? v.x : step % 4 == 1 ? v.y : step % 4 == 2 ? v.z : v.w;
          unpack_bytes<E5M2 ? 5 : 4>(load_shared(dot_bytes(word, lane_byte, lane_book) + step * 4096), a[half], a[half + 2]);
        }
        multiply(c[tile], a[0], a[1], a[2], a[3], q[step][0], q[step][1]);
      }
    }
    // 2. scale, mask, maximum
    const bool is_open = chunk >= SINK && chunk + 64 <= min(end, seq_len - window);
    const u32 rho_words[4] = {rho4.x, rho4.y, rho4.z, rho4.w}, s_words[4] = {s4.x, s4.y, s4.z, s4.w};
    float s[8], top[2] = {MASKED, MASKED};
    if (is_open) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        s[i] = bf16_of(s_words[i / 2], i % 2);
        scale_logits(&c[i / 2][2 * (i % 2)], bf16_of(rho_words[i / 2], i % 2), log2_scale(s[i]), row_scale, row_offset, cap, top);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int j = chunk + row + 8 * i;
        bool is_key = j < end;
        if (is_key && (j < SINK || j >= seq_len - window)) is_key = band_blocks[j / BAND_BLOCK] == 0;
        // memory past the end may hold anything
        s[i] = is_key ? bf16_of(s_words[i / 2], i % 2) : 0.0f;
        float* x = &c[i / 2][2 * (i % 2)];
        if (is_key) scale_logits(x, bf16_of(rho_words[i / 2], i % 2), log2_scale(s[i]), row_scale, row_offset, cap, top);
        else x[0] = x[1] = __int_as_float(0xFF800000);
      }
    }
    if (__any_sync(0xFFFFFFFFu, top[0] > m[0] || top[1] > m[1])) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          top[k] = fmaxf(top[k], __shfl_xor_sync(0xFFFFFFFFu, top[k], offset));
        const float new_m = fmaxf(m[k], top[k]);
        const float decay = exp2_fast(m[k] - new_m);
        m[k] = new_m;
        total[k] *= decay;
        value_total[k] *= decay;
#pragma unroll
        for (int i = 0; i < TILES; i++) { out[i][k] *= decay; out[i][k + 2] *= decay; }
      }
    }
    // 3. weights and values
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      u32 b[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float w[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float weight = exp2_fast(c[tile][2 * half + k] - m[k]);
          total[k] += weight;
          w[k] = weight * s[2 * tile + half];
        }
        b[half] = transpose(pack_half(w[0], w[1]));
      }
      multiply(value_total, ONES, ONES, ONES, ONES, b[0], b[1]);
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        // 8 codes of tokens 2 quad, 2 quad + 1 and of both + 8
        u32 near, far;
#if D == 64
        near = cells[tile][0]; far = cells[tile][1];
#elif D == 128
        const u32 pick = set ? 0x7632 : 0x5410;
        near = __byte_perm(cells[tile][0], cells[tile][1], pick);
        far = __byte_perm(cells[tile][2], cells[tile][3], pick);
#else
        const u32 pick = set % 2 ? 0x7632 : 0x5410;
        near = __byte_perm(cells[tile][set / 2], cells[tile][2 + set / 2], pick);
        far = __byte_perm(cells[tile][4 + set / 2], cells[tile][6 + set / 2], pick);
#endif
        const u32 upper_near = near >> 10, upper_far = far >> 10;
#pragma unroll
        for (int i = 0; i < 4; i++)
          multiply(out[4 * set + i], value_pair(near, upper_near, 2 * i), value_pair(near, upper_near, 2 * i + 1),
                   value_pair(far, upper_far, 2 * i), value_pair(far, upper_far, 2 * i + 1), b[0], b[1]);
      }
    }
    chunk = following;
    block = next_block;
    if (chunk / (64 * WARPS) % CENTRED_CHUNKS == 0) centre(out, value_total);
  }
  centre(out, value_total);

  // 4. one softmax out of four: the codebook's memory is free now
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) total[k] += __shfl_xor_sync(0xFFFFFFFFu, total[k], offset);
  __syncthreads();
  float* shared_m = (float*)book;
  float* shared_total = shared_m + WARPS * 8;
  float* shared_out = shared_total + WARPS * 8;
  if (row == 0)
#pragma unroll
    for (int k = 0; k < 2; k++) shared_m[warp * 8 + 2 * quad + k] = m[k];
  __syncthreads();
  float all[2], part_scale[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    all[k] = MASKED;
#pragma unroll
    for (int i = 0; i < WARPS; i++) all[k] = fmaxf(all[k], shared_m[i * 8 + 2 * quad + k]);
    part_scale[k] = exp2_fast(m[k] - all[k]);
    if (row == 0) shared_total[warp * 8 + 2 * quad + k] = total[k] * part_scale[k];
  }
  // [head][dim], a padded row per head; the warps add up one after the other
  for (int turn = 0; turn < WARPS; turn++) {
    if (warp == turn)
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int dim = 16 * i + row + 8 * (k / 2), head = 2 * quad + k % 2;
          const float unit = __int_as_float((127 + 24 - code_place_of(i, k)) << 23);
          const float x = unit * out[i][k] * part_scale[k % 2];
          float* place = shared_out + head * (D + 4) + dim;
          *place = turn ? *place + x : x;
        }
    __syncthreads();
  }
  if (thread < 8) {
    float x = 0.0f, top = MASKED;
    for (int i = 0; i < WARPS; i++) { x += shared_total[i * 8 + thread]; top = fmaxf(top, shared_m[i * 8 + thread]); }
    part_weights[thread] = top;
    part_weights[ROWS + thread] = x;
  }
  for (int i = thread; i < 8 * D; i += 128) partial[part * ROWS * D + i] = shared_out[i / D * (D + 4) + i % D];
}
