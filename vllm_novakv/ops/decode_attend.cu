// The second launch of ops/decode_cuda.py: history and band, in partial results.
//
// Grid (CTA, KV head), a CTA on every multiprocessor. CTAs stay on their head, whose codebook they keep in shared memory.
// Each warp is a worker of the head's line of work (decode_common.cuh), on its own from beginning to end: no barrier, no
// shared result, except where a CTA has nothing but one request's history.
//
// A warp takes a chunk of 32 or 64 tokens at a time, 16 tokens to a tensor-core tile, and keeps its own online softmax:
//
//     logits^T [16 tokens, 8 heads] = K [16, D] Q^T [D, 8]      K from shared memory straight into the A fragment
//     O^T      [16 dims, 8 heads]  += V^T [16, 16 tokens] W^T   V from one 16-byte load straight into the A fragment
//
// Lane = 4 row + quad. For m16n8k16 a lane holds k = 2 quad, 2 quad + 1 and both + 8: these four are the elements of
// group STEPS · quad + step, so that a lane's indices of a token are neighbours in memory. Weights go from the first
// product's C fragment to the second's B fragment by transposing 8x8 tiles (movmatrix).
//
// A band's products are alike, of bf16: 8 neighbouring elements of a key, one load, are a lane's share of two steps of
// k = 16, in whatever order, as the query's are the same; values are transposed on their way, too. Queries that are not
// bf16, and all weights, are sums of bf16 terms.
//
// What limits the kernel is the number of instructions and of warps to issue them, so the inner loop has few registers
// (16 warps at D = 64, 12 at 128) and few instructions:
//   - the codebook has COPIES copies, side by side: word [step][centroid][copy][quad], so that the lanes of a look-up fall
//     on banks of their own as far as memory admits (8 copies: always; 4: two lanes share two banks)
//   - an index's address in the codebook is one dot product of bytes (dp4a)
//   - centroids of integers need no conversion: m16n8k32 takes them as they are; the query is integers of two bytes, each
//     a product of its own, whose sums are exact
//   - a value code x at bits 2j of a half-word is read where it lies, as the subnormal fp16 number x · 2^(2j − 24): one
//     AND; the powers of two are taken out at the end, the −1.5 of x − 1.5 with the sum of weights, which is one more
//     row of the product, now and then, so that no sum grows to where the products' truncation shows
//   - the maximum is shared among lanes, and the output rescaled, only when some lane has a larger one
//   - history that the band holds is not read
//
// Macros: those of decode_common.cuh, BAND_BLOCK, HAS_CAP, COPIES of the codebook.

#define GROUPS (D / 4)
#define SETS (D / 64)
#define TILES (D / 16)
#define THREADS (32 * WARPS)
#define CHUNK_TILES (CHUNK / 16)
#define CHUNK_ROWS (CHUNK / 8)
#define BLOCK_CHUNKS (128 / CHUNK)
#define CENTRED_CHUNKS 16
// bf16 terms of a query and of a weight
#define QUERY_TERMS (3 - TYPE)
#define WEIGHT_TERMS (TYPE == 0 ? 3 : 2)
// places where warps add up their outputs, one turn after the other
#define SLOTS 4
#define TURNS ((WARPS + SLOTS - 1) / SLOTS)
#define BOOK_WORDS (GROUPS * 256 * COPIES)
#define BOOK_LOADS ((STEPS * 256 + THREADS - 1) / THREADS)
#define OUT_PITCH (D + 4)
// of 128 bytes, of a chunk: its indices, its values, its scales, two planes
#define INDEX_LINES (CHUNK * GROUPS / 128)
#define CHUNK_LINES (2 * INDEX_LINES + 2)
#define PREFETCHES ((CHUNK_LINES + 31) / 32)
#define ONES 0x3C003C00u

#ifndef EMULATED
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
// four 8-bit floats as two pairs of fp16; one with five exponent bits is the upper half of an fp16
template <int EXPONENT_BITS> __device__ __forceinline__ void unpack_bytes(u32 word, u32& low, u32& high) {
#if FORMAT == 1
  low = __byte_perm(word, 0, 0x1404);
  high = __byte_perm(word, 0, 0x3424);
#else
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}" : "=r"(low), "=r"(high) : "r"(word));
#endif
}
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// the compiler takes x for a number that it cannot compute again
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }
// m16n8k32 of s8
__device__ __forceinline__ void multiply_bytes(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
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

// N neighbouring words, N a power of two
template <int N> __device__ __forceinline__ void load_words(u32 (&x)[N], const void* p) {
  if constexpr (N == 1) x[0] = __ldg((const u32*)p);
  else if constexpr (N == 2) {
    const uint2 y = __ldg((const uint2*)p);
    x[0] = y.x; x[1] = y.y;
  } else {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const uint4 y = __ldg((const uint4*)p + i);
      x[4 * i] = y.x; x[4 * i + 1] = y.y; x[4 * i + 2] = y.z; x[4 * i + 3] = y.w;
    }
  }
}
// the word of the centroid that a lane's index of a step names
__device__ __forceinline__ u32 look_up(const u32 (&indices)[STEPS / 4], int step, u32 lane_book) {
  const u32 address = dot_bytes(indices[step / 4], (16 * COPIES) << (8 * (step % 4)), lane_book);
  return load_shared(address + step * 4096 * COPIES);
}
// What a lane has of a chunk that begins at token `first` of a block: indices of tokens row + 8 i,
__device__ __forceinline__ void load_indices(u32 (&x)[CHUNK_TILES][2][STEPS / 4], const u8* block, u32 first, int row, int quad) {
  const u8* own = block + (first * GROUPS + row * GROUPS + quad * STEPS);
#pragma unroll
  for (int tile = 0; tile < CHUNK_TILES; tile++)
#pragma unroll
    for (int half = 0; half < 2; half++) load_words(x[tile][half], own + (16 * tile + 8 * half) * GROUPS);
}
// their scales, a lane's 8 of 64 tokens are neighbours,
__device__ __forceinline__ void load_scales(u32 (&rho)[CHUNK_ROWS / 2], u32 (&s)[CHUNK_ROWS / 2], const u8* block, u32 first, int row) {
  const u8* own = block + (128 * (GROUPS + D / 4) + first / 64 * 128 + first % 64 / 4 + row * 16);
  load_words(rho, own);
  load_words(s, own + 256);
}
// and value cells of its tiles.
__device__ __forceinline__ void load_cells(u32 (&x)[CHUNK_TILES][D / 32], const u8* block, u32 first, int lane) {
  const u8* own = block + (128 * GROUPS + first * (D / 4) + lane * (D / 8));
#pragma unroll
  for (int tile = 0; tile < CHUNK_TILES; tile++) load_words(x[tile], own + tile * (4 * D));
}
// Where a lane's lines of a chunk begin, relative to a block's start and to the chunk's; GROUPS = D / 4.
struct Lines {
  u32 place[PREFETCHES], pitch[PREFETCHES];
  __device__ __forceinline__ explicit Lines(int lane) {
#pragma unroll
    for (int i = 0; i < PREFETCHES; i++) {
      const int line = 32 * i + lane, in_scales = line - 2 * INDEX_LINES;
      const bool is_value = line >= INDEX_LINES;
      place[i] = in_scales < 0 ? is_value * (128 - CHUNK) * GROUPS + line * 128 : 256 * GROUPS + in_scales * 256;
      pitch[i] = in_scales < 0 ? GROUPS : 2;
      keep(place[i]);
      keep(pitch[i]);
    }
  }
  __device__ __forceinline__ void prefetch_chunk(const u8* block, u32 first, int lane) const {
#pragma unroll
    for (int i = 0; i < PREFETCHES; i++)
      if (32 * i + lane < CHUNK_LINES) prefetch(block + (place[i] + pitch[i] * first));
  }
};
// the largest logit of each head among a warp's lanes; where it has grown, everything so far is rescaled
__device__ __forceinline__ void raise_maximum(float (&top)[2], float (&m)[2], float (&total)[2], float (&value_total)[4],
                                              float (&out)[TILES][4]) {
  if (!__any_sync(0xFFFFFFFFu, top[0] > m[0] || top[1] > m[1])) return;
#pragma unroll
  for (int k = 0; k < 2; k++) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) top[k] = fmaxf(top[k], __shfl_xor_sync(0xFFFFFFFFu, top[k], offset));
    const float new_m = fmaxf(m[k], top[k]);
    const float decay = exp2_fast(m[k] - new_m);
    m[k] = new_m;
    total[k] *= decay;
    value_total[k] *= decay;
#pragma unroll
    for (int i = 0; i < TILES; i++) { out[i][k] *= decay; out[i][k + 2] *= decay; }
  }
}
// Of which dimension, and in what unit, a lane's output k of tile i is, depends on the kind of partial result.
template <bool IS_BAND> __device__ __forceinline__ int dim_of(int i, int k, int row) {
  return IS_BAND ? i / 2 * 32 + row / 2 * 8 + i % 2 * 4 + k / 2 * 2 + row % 2 : 16 * i + row + 8 * (k / 2);
}
template <bool IS_BAND> __device__ __forceinline__ float unit_of(int i, int k) {
  return IS_BAND ? 1.0f : __int_as_float((127 + 24 - code_place_of(i, k)) << 23);
}
__device__ __forceinline__ void add_lanes(float (&total)[2]) {
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) total[k] += __shfl_xor_sync(0xFFFFFFFFu, total[k], offset);
}
// A partial result of a warp. Its outputs are of heads 2 quad, 2 quad + 1.
template <bool IS_BAND>
__device__ __forceinline__ void write_partial(const float (&m)[2], float (&total)[2], const float (&out)[TILES][4],
                                              float* weights, float* partial) {
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  add_lanes(total);
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const int head = 2 * quad + k;
    if (head >= GROUP) continue;
    if (row == 0) { weights[head] = m[k]; weights[GROUP + head] = total[k]; }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        partial[head * D + dim_of<IS_BAND>(i, 2 * half, row)] = unit_of<IS_BAND>(i, 2 * half) * out[i][2 * half + k];
  }
}
// One partial result out of those that all warps have of a history.
struct Results { float *m, *total, *out; };
__device__ __forceinline__ void merge_warps(const Results& shared, const float (&m)[2], float (&total)[2],
                                            const float (&out)[TILES][4], float* weights, float* partial) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  add_lanes(total);
  if (row == 0)
#pragma unroll
    for (int k = 0; k < 2; k++) shared.m[warp * 8 + 2 * quad + k] = m[k];
  __syncthreads();
  float part_scale[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    float all = MASKED;
#pragma unroll
    for (int i = 0; i < WARPS; i++) all = fmaxf(all, shared.m[i * 8 + 2 * quad + k]);
    part_scale[k] = exp2_fast(m[k] - all);
    if (row == 0) shared.total[warp * 8 + 2 * quad + k] = total[k] * part_scale[k];
  }
  // [slot][head][dim], a padded row per head
  for (int turn = 0; turn < TURNS; turn++) {
    if (warp / SLOTS == turn)
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float x = unit_of<false>(i, k) * out[i][k] * part_scale[k % 2];
          float* sum = shared.out + (warp % SLOTS * 8 + 2 * quad + k % 2) * OUT_PITCH + dim_of<false>(i, k, row);
          *sum = turn ? *sum + x : x;
        }
    __syncthreads();
  }
  if (thread < GROUP) {
    float x = 0.0f, top = MASKED;
    for (int i = 0; i < WARPS; i++) { x += shared.total[i * 8 + thread]; top = fmaxf(top, shared.m[i * 8 + thread]); }
    weights[thread] = top;
    weights[GROUP + thread] = x;
  }
  for (int i = thread; i < GROUP * D; i += THREADS) {
    float x = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) x += shared.out[(slot * 8 + i / D) * OUT_PITCH + i % D];
    partial[i] = x;
  }
}
// Exact keys, tiles of [sink | recent]; blocks of 0 are not held.
struct Band { const u16* band; const int* blocks; int stride_b, stride_t; };
__device__ __forceinline__ void attend_band(const Band& band, const Query* query, int query_stride_h, const Request& request,
                                            int first_tile, int end_tile, float to_log2, float cap, float* weights,
                                            float* partial) {
  const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  // heads in columns: the lane's of head `row`
  u32 q[D / 8][QUERY_TERMS];
#pragma unroll
  for (int i = 0; i < D / 32; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const Query* x = query + min(row, GROUP - 1) * query_stride_h + 32 * i + 8 * quad + 2 * k;
      split_pair(number(x[0]), number(x[1]), q[4 * i + k]);
    }
  const int num_tokens = request.band_tokens(), first_recent = request.first_recent();
  float m[2] = {MASKED, MASKED}, total[2] = {0, 0}, unused[4] = {0, 0, 0, 0}, out[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) out[i][k] = 0.0f;
  for (int tile = first_tile; tile < end_tile; tile++) {
    const u16* tokens[2];
    bool is_key[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = BAND_TILE * tile + row + 8 * half, j = i < SINK ? i : first_recent + i - SINK;
      const int block = i < num_tokens ? band.blocks[j / BAND_BLOCK] : 0;
      is_key[half] = block > 0;
      tokens[half] = band.band + (long long)block * band.stride_b + (is_key[half] ? j % BAND_BLOCK * band.stride_t : 0) + 8 * quad;
    }
    // values come as far as L2 while the keys are at work
    if (is_key[quad / 2]) prefetch(tokens[quad / 2] + D - 8 * quad + quad % 2 * (D / 2));
    uint4 x[2][D / 32];
    const uint4 zero = {0, 0, 0, 0};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      // what is not held may be anything, and is not read
      for (int i = 0; i < D / 32; i++) x[half][i] = is_key[half] ? __ldg((const uint4*)(tokens[half] + 32 * i)) : zero;
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < D / 32; i++)
#pragma unroll
      for (int term = 0; term < QUERY_TERMS; term++) {
        multiply_bf16(c, x[0][i].x, x[1][i].x, x[0][i].y, x[1][i].y, q[4 * i][term], q[4 * i + 1][term]);
        multiply_bf16(c, x[0][i].z, x[1][i].z, x[0][i].w, x[1][i].w, q[4 * i + 2][term], q[4 * i + 3][term]);
      }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < D / 32; i++) x[half][i] = is_key[half] ? __ldg((const uint4*)(tokens[half] + D + 32 * i)) : zero;
    float top[2] = {MASKED, MASKED};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      c[k] *= to_log2;
#if HAS_CAP
      c[k] = soft_cap(c[k], cap) * LOG2E;
#endif
      if (is_key[k / 2]) top[k % 2] = fmaxf(top[k % 2], c[k]); else c[k] = __int_as_float(0xFF800000);
    }
    raise_maximum(top, m, total, unused, out);
    u32 b[2][WEIGHT_TERMS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float w[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        w[k] = exp2_fast(c[2 * half + k] - m[k]);
        total[k] += w[k];
      }
      split_pair(w[0], w[1], b[half]);
#pragma unroll
      for (int term = 0; term < WEIGHT_TERMS; term++) b[half][term] = transpose(b[half][term]);
    }
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const u32 v0 = transpose(x[0][i].x), v1 = transpose(x[0][i].y), v2 = transpose(x[1][i].x), v3 = transpose(x[1][i].y);
      const u32 v4 = transpose(x[0][i].z), v5 = transpose(x[0][i].w), v6 = transpose(x[1][i].z), v7 = transpose(x[1][i].w);
#pragma unroll
      for (int term = 0; term < WEIGHT_TERMS; term++) {
        multiply_bf16(out[2 * i], v0, v1, v2, v3, b[0][term], b[1][term]);
        multiply_bf16(out[2 * i + 1], v4, v5, v6, v7, b[0][term], b[1][term]);
      }
    }
  }
  write_partial<true>(m, total, out, weights, partial);
}
// whether the band holds these blocks of tokens
__device__ __forceinline__ bool is_held(const int* band_blocks, int first_token, int end_token) {
  bool is_missing = false;
  for (int i = first_token / BAND_BLOCK + threadIdx.x % 32; i < (end_token + BAND_BLOCK - 1) / BAND_BLOCK; i += 32)
    is_missing |= band_blocks[i] == 0;
  return !__any_sync(0xFFFFFFFFu, is_missing);
}

__device__ __forceinline__ Request request_in(int length) { return {abs(length), length < 0 ? PROMPT_RECENT : RECENT}; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_attend(
    const u16* folded, const float* row_scales, const u8* cache, const u32* table, const int* block_table,
    const int* band_table, const int* seq_lens, const int* prompt_lens, const Query* query, const u16* band, float* partial,
    float* weights, int4* all_parts, int num_requests, int block_stride_16, int head_stride_16, int block_table_stride,
    int band_table_stride, int query_stride_t, int query_stride_h, int band_stride_b, int band_stride_h, int band_stride_t,
    int scale_bits, int cap_bits) {
  DYNAMIC_SHARED(u32, book);
  float* const results = (float*)(book + BOOK_WORDS);
  const Results shared = {results, results + WARPS * 8, results + WARPS * 16};
  int* const starts = (int*)(results + WARPS * 16 + SLOTS * 8 * OUT_PITCH);
  // a length below zero is that of a request in its prompt
  int* const lengths = starts + num_requests + 1;
  __shared__ int warp_sums[WARPS];
  const int ctas = gridDim.x, cta = blockIdx.x, h = blockIdx.y, heads = gridDim.y;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  // 1. the codebook, on its way while the line is drawn
  const u32* source = table + (long long)h * GROUPS * 256;
  uint4 words[BOOK_LOADS];
#pragma unroll
  for (int i = 0; i < BOOK_LOADS; i++) {
    const u32* first = source + min(i * THREADS + thread, STEPS * 256 - 1);
    words[i] = {__ldg(first), __ldg(first + STEPS * 256), __ldg(first + 2 * STEPS * 256), __ldg(first + 3 * STEPS * 256)};
  }
  // 2. the line of work: where each request begins
  int length = 0;
  for (int first = 0; first < num_requests; first += THREADS) {
    const int r = first + thread, seq_len = r < num_requests ? seq_lens[r] : 0;
    const Request own_request = request_of(seq_len, r < num_requests ? prompt_lens[r] : 0);
    const int own = seq_len > 0 ? own_request.band_units() + own_request.history_units() : 0;
    int sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) { if (i < warp) sum += warp_sums[i]; all += warp_sums[i]; }
    if (r < num_requests) {
      starts[r] = length + sum - own;
      lengths[r] = own_request.window == RECENT ? seq_len : -seq_len;
    }
    length += all;
    __syncthreads();
  }
  if (thread == 0) starts[num_requests] = length;
#pragma unroll
  for (int i = 0; i < BOOK_LOADS; i++)
    if (i * THREADS + thread < STEPS * 256)
#pragma unroll
      // neighbouring lanes begin with different copies, so that they write to banks of their own
      for (int copy = 0; copy < COPIES; copy++)
        ((uint4*)book)[(i * THREADS + thread) * COPIES + (copy + lane * COPIES / 8) % COPIES] = words[i];
  __syncthreads();
  const Line line = make_line(length, ctas);
  const int worker = cta * WARPS + warp, line_end = line.start_of(worker + 1);
  const bool has_work = worker < line.workers;
  const u8* const head_cache = cache + (long long)h * head_stride_16 * 16;
  const long long block_bytes = (long long)block_stride_16 * 16;
  const Lines lines(lane);
  int place = line.start_of(worker), r = 0, ahead_chunk = -1, ahead_block = 0;
  if (has_work) {
    // the last request that begins at or before our place
    for (int high = num_requests; high - r > 1;) {
      const int middle = (r + high) / 2;
      if (starts[middle] <= place) r = middle; else high = middle;
    }
    // a history's first chunk is on its way before the query is there
    const Request request = request_in(lengths[r]);
    const int unit = place - starts[r] - request.band_units();
    if (unit >= 0) {
      ahead_chunk = min(chunk_at(request, unit), (request.seq_len - 1) / CHUNK);
      ahead_block = block_table[(long long)r * block_table_stride + ahead_chunk / BLOCK_CHUNKS];
      lines.prefetch_chunk(head_cache + ahead_block * block_bytes, ahead_chunk % BLOCK_CHUNKS * CHUNK, lane);
    }
  }
  wait_for_previous_launch();
  // where the third launch finds each request's parts
  if (cta == 0 && h == 0)
    for (int i = thread; i < num_requests; i += THREADS) {
      Parts parts = {};
      if (lengths[i] != 0) parts = parts_of(line, request_in(lengths[i]), starts[i], i, heads, ctas, num_requests);
      all_parts[2 * i] = {parts.ends[0], parts.ends[1], parts.ends[2], parts.ends[3]};
      all_parts[2 * i + 1] = {parts.shifts[0], parts.shifts[1], parts.shifts[2], parts.shifts[3]};
    }
  if (!has_work) return;
  const u32 lane_book = shared_address(book) + row * COPIES / 8 * 16 + quad * 4;
  const float scale = __int_as_float(scale_bits), cap = __int_as_float(cap_bits);
#if HAS_CAP
  const float to_log2 = 1.0f;
#else
  const float to_log2 = LOG2E;
#endif

  // 3. what the worker has of each request
  for (; place < line_end; r++, place = starts[r]) {
    if (lengths[r] == 0) continue;
    const Request request = request_in(lengths[r]);
    const int seq_len = request.seq_len;
    const long long pair = (long long)r * heads + h;
    const int* band_blocks = band_table + (long long)r * band_table_stride;
    const int band_units = request.band_units(), history = starts[r] + band_units;
    if (place < history) {
      const int first = place - starts[r], end = min(line_end - starts[r], band_units);
      const long long entry = worker_entry(false, h, heads, ctas, num_requests) + worker + r;
      attend_band({band + (long long)h * band_stride_h, band_blocks, band_stride_b, band_stride_t},
                  query + (long long)r * query_stride_t + (long long)h * GROUP * query_stride_h, query_stride_h, request,
                  tile_at(first), tile_at(end), scale * to_log2, cap, weights + entry * 2 * GROUP,
                  partial + entry * GROUP * D);
    }
    if (line_end <= history) continue;
    const int units = request.history_units();
    const int first_unit = max(place - history, 0), end_unit = min(line_end - history, units);
    u32 chunk = chunk_at(request, first_unit), end_chunk = chunk_at(request, end_unit);
    // what the band ought to hold, and does not, is read here
    if (first_unit == 0 && !is_held(band_blocks, 0, min(request.first_chunk() * CHUNK, seq_len))) chunk = 0;
    if (end_unit == units && !is_held(band_blocks, request.end_chunk() * CHUNK, seq_len)) end_chunk = (seq_len + CHUNK - 1) / CHUNK;
    end_chunk = min(end_chunk, (u32)(seq_len + CHUNK - 1) / CHUNK);
    // B fragments of the query: heads in columns; of its integers the upper bytes, then the lower ones
    const u16* own_query = folded + (pair * GROUP + min(row, GROUP - 1)) * D;
#if FORMAT == 2
    u32 upper[STEPS], lower[STEPS];
    load_words(upper, (const u8*)own_query + quad * (D / 4));
    load_words(lower, (const u8*)own_query + D + quad * (D / 4));
#else
    u32 q[2 * STEPS];
    load_words(q, own_query + quad * (D / 4));
#endif
    float row_scale[2], row_offset[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* own = row_scales + pair * 2 * GROUP + min(2 * quad + i, GROUP - 1);
      row_scale[i] = own[0] * scale * to_log2;
      row_offset[i] = own[GROUP] * scale * to_log2;
    }
    float m[2] = {MASKED, MASKED}, total[2] = {0, 0};
    float out[TILES][4], value_total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) out[i][k] = 0.0f;

    // A chunk comes as far as L2 while the one before it is at work, and into registers when that has used its own.
    const int* blocks = block_table + (long long)r * block_table_stride;
    const u32 last = end_chunk - 1, last_block = last / BLOCK_CHUNKS;
    const u8* block = head_cache;
    int following_block = 0, until_centred = CENTRED_CHUNKS;
    u32 indices[CHUNK_TILES][2][STEPS / 4], cells[CHUNK_TILES][D / 32], rho_words[CHUNK_ROWS / 2], s_words[CHUNK_ROWS / 2];
    if (chunk < end_chunk) {
      const u32 first = chunk % BLOCK_CHUNKS * CHUNK;
      block = head_cache + (chunk == ahead_chunk ? ahead_block : blocks[chunk / BLOCK_CHUNKS]) * block_bytes;
      following_block = blocks[min(chunk / BLOCK_CHUNKS + 1, last_block)];
      load_indices(indices, block, first, row, quad);
      load_scales(rho_words, s_words, block, first, row);
      load_cells(cells, block, first, lane);
    }
    // it belongs to this request, even if nothing of it was read
    ahead_chunk = -1;
    for (; chunk < end_chunk; chunk++) {
      const u32 first = chunk % BLOCK_CHUNKS * CHUNK;
      // the last chunk is followed by itself
      const u32 next_first = chunk == last ? first : (first + CHUNK) % 128;
      const u8* next_block = block;
      if (next_first < first) {
        next_block = head_cache + following_block * block_bytes;
        following_block = blocks[min(chunk / BLOCK_CHUNKS + 2, last_block)];
      }
      lines.prefetch_chunk(next_block, next_first, lane);
      // 1. logits
      float c[CHUNK_TILES][4];
#if FORMAT == 2
      int high[CHUNK_TILES][4], low[CHUNK_TILES][4];
#pragma unroll
      for (int tile = 0; tile < CHUNK_TILES; tile++)
#pragma unroll
        for (int k = 0; k < 4; k++) high[tile][k] = low[tile][k] = 0;
#pragma unroll
      for (int step = 0; step < STEPS; step += 2)
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++) {
          // a centroid is a lane's four k as it is
          u32 a[2][2];
#pragma unroll
          for (int i = 0; i < 2; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) a[i][half] = look_up(indices[tile][half], step + i, lane_book);
          multiply_bytes(high[tile], a[0][0], a[0][1], a[1][0], a[1][1], upper[step], upper[step + 1]);
          multiply_bytes(low[tile], a[0][0], a[0][1], a[1][0], a[1][1], lower[step], lower[step + 1]);
        }
#pragma unroll
      for (int tile = 0; tile < CHUNK_TILES; tile++)
#pragma unroll
        for (int k = 0; k < 4; k++) c[tile][k] = (float)(256 * high[tile][k] + low[tile][k]);
#else
#pragma unroll
      for (int tile = 0; tile < CHUNK_TILES; tile++)
#pragma unroll
        for (int k = 0; k < 4; k++) c[tile][k] = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int tile = 0; tile < CHUNK_TILES; tile++) {
          u32 a[4];
#pragma unroll
          for (int half = 0; half < 2; half++)
            unpack_bytes<FORMAT == 1 ? 5 : 4>(look_up(indices[tile][half], step, lane_book), a[half], a[half + 2]);
          multiply(c[tile], a[0], a[1], a[2], a[3], q[2 * step], q[2 * step + 1]);
        }
#endif
      load_indices(indices, next_block, next_first, row, quad);
      // 2. scale, mask, maximum
      const int start = CHUNK * chunk;
      const bool is_open = start >= SINK && start + CHUNK <= seq_len - request.window;
      float s[CHUNK_ROWS], top[2] = {MASKED, MASKED};
      if (is_open) {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; i++) {
          s[i] = bf16_of(s_words[i / 2], i % 2);
          scale_logits(&c[i / 2][2 * (i % 2)], bf16_of(rho_words[i / 2], i % 2), log2_scale(s[i]), row_scale, row_offset, cap, top);
        }
      } else {
#pragma unroll
        for (int i = 0; i < CHUNK_ROWS; i++) {
          const int j = start + row + 8 * i;
          bool is_key = j < seq_len;
          if (is_key && (j < SINK || j >= seq_len - request.window)) is_key = band_blocks[j / BAND_BLOCK] == 0;
          // memory past the end may hold anything
          s[i] = is_key ? bf16_of(s_words[i / 2], i % 2) : 0.0f;
          float* x = &c[i / 2][2 * (i % 2)];
          if (is_key) scale_logits(x, bf16_of(rho_words[i / 2], i % 2), log2_scale(s[i]), row_scale, row_offset, cap, top);
          else x[0] = x[1] = __int_as_float(0xFF800000);
        }
      }
      load_scales(rho_words, s_words, next_block, next_first, row);
      raise_maximum(top, m, total, value_total, out);
      // 3. weights and values
#pragma unroll
      for (int tile = 0; tile < CHUNK_TILES; tile++) {
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
      load_cells(cells, next_block, next_first, lane);
      block = next_block;
      if (--until_centred == 0) { centre(out, value_total); until_centred = CENTRED_CHUNKS; }
    }
    centre(out, value_total);

    // the last that there is to do
    if (line_end <= starts[r + 1]) let_next_launch_begin();
    if (line.is_within(cta, history, history + units)) {
      const long long entry = cta_entry(h, heads, ctas, num_requests) + cta;
      merge_warps(shared, m, total, out, weights + entry * 2 * GROUP, partial + entry * GROUP * D);
    } else {
      const long long entry = worker_entry(true, h, heads, ctas, num_requests) + worker + r;
      write_partial<false>(m, total, out, weights + entry * 2 * GROUP, partial + entry * GROUP * D);
    }
  }
}
