// History and band of paged decode for compute capability 8.9 and up, 8.0 with centroids of e5m2: the second launch of
// ops/paged_decode.py, with the results of its Triton kernels.
//
// Grid (CTA, KV head): CTAs stay on their head, whose codebook they keep in shared memory, and share its work evenly,
// whatever the requests' lengths: the requests stand in one line, each with its band (BAND_COST), its chunks of 64 tokens
// and SEGMENT_COST for what a segment costs, and CTA c takes the c-th part of the line. A segment, what a CTA has of a
// request's history, is one partial result; those of a request are neighbours (entry c + request of the head), and `parts`
// says where. A band belongs to the CTA where it begins.
//
// A warp takes a chunk at a time, 16 tokens to a tensor-core tile, and keeps its own online softmax:
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
// What limits the kernel is the number of instructions and of shared-memory accesses, so the inner loop has few:
//   - the codebook has COPIES copies, side by side: word [step][centroid][copy][quad], so that the lanes of a look-up fall
//     on banks of their own as far as memory admits (8 copies: always; 4: two lanes share two banks)
//   - an index's address in the codebook is one dot product of bytes (dp4a)
//   - a value code x at bits 2j of a half-word is read where it lies, as the subnormal fp16 number x · 2^(2j − 24): one
//     AND; the powers of two are taken out at the end, the −1.5 of x − 1.5 with the sum of weights, which is one more
//     row of the product, now and then, so that no sum grows to where the products' truncation shows
//   - the maximum is shared among lanes, and the output rescaled, only when some lane has a larger one
//
// Macros: D head size, E5M2 type of the centroids, SINK, RECENT, PROMPT_RECENT, BAND_BLOCK, ROWS query rows in memory,
// HAS_CAP, TYPE of queries (0 f32, 1 f16, 2 bf16), GROUP query heads of a KV head, WARPS of a CTA, COPIES of the codebook.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define GROUPS (D / 4)
#define STEPS (D / 16)
#define SETS (D / 64)
#define TILES (D / 16)
#define THREADS (32 * WARPS)
#define CENTRED_CHUNKS 8
// in chunks that take as long
#define SEGMENT_COST 8
#define BAND_COST 20
// bf16 terms of a query and of a weight
#define QUERY_TERMS (3 - TYPE)
#define WEIGHT_TERMS (TYPE == 0 ? 3 : 2)
// warps that add up their outputs one after the other, in SLOTS places at a time
#define TURNS 4
#define SLOTS (WARPS / TURNS)
#define BOOK_WORDS (GROUPS * 256 * COPIES)
#define BOOK_LOADS ((STEPS * 256 + THREADS - 1) / THREADS)
#define OUT_PITCH (D + 4)
// lines of a chunk's values, and of each of its two scale planes
#define VALUE_LINES (16 * D / 128)
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
// four 8-bit floats as two pairs of fp16; one with five exponent bits is the upper half of an fp16
template <int EXPONENT_BITS> __device__ __forceinline__ void unpack_bytes(u32 word, u32& low, u32& high) {
#if E5M2
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
__device__ __forceinline__ void multiply_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }
__device__ __forceinline__ float of_half(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
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
// a lane's indices of two tokens, 8 apart
__device__ __forceinline__ void load_indices(u32 (&x)[2][STEPS / 4], const u8* block, int token, int quad) {
#pragma unroll
  for (int half = 0; half < 2; half++) load_words(x[half], block + (token + 8 * half) * GROUPS + quad * STEPS);
}
// two numbers as TERMS pairs of bf16 whose sums they are; with the last term all bits of an f32 are out at three
template <int TERMS> __device__ __forceinline__ void split_pair(float x, float y, u32 (&terms)[TERMS]) {
#pragma unroll
  for (int i = 0; i < TERMS; i++) {
    const u32 low = __float_as_uint(x) & 0xFFFF0000, high = __float_as_uint(y) & 0xFFFF0000;
    terms[i] = __byte_perm(low, high, 0x7632);
    x -= __uint_as_float(low);
    y -= __uint_as_float(high);
  }
}
#if TYPE == 0
typedef float Query;
#else
typedef u16 Query;
#endif
__device__ __forceinline__ float number(Query x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return of_half(x);
#else
  return __uint_as_float((u32)x << 16);
#endif
}
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
// One softmax out of the warps'. A lane's outputs are of heads 2 quad, 2 quad + 1; of which dimensions, and in what unit,
// depends on the kind of segment.
struct Results { float *m, *total, *out; };
template <bool IS_BAND>
__device__ __forceinline__ void merge_warps(const Results& shared, const float (&m)[2], float (&total)[2],
                                            const float (&out)[TILES][4], float* weights, float* partial) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
  for (int k = 0; k < 2; k++)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) total[k] += __shfl_xor_sync(0xFFFFFFFFu, total[k], offset);
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
          const int head = 2 * quad + k % 2;
          const int dim = IS_BAND ? i / 2 * 32 + row / 2 * 8 + i % 2 * 4 + k / 2 * 2 + row % 2 : 16 * i + row + 8 * (k / 2);
          const float unit = IS_BAND ? 1.0f : __int_as_float((127 + 24 - code_place_of(i, k)) << 23);
          const float x = unit * out[i][k] * part_scale[k % 2];
          float* sum = shared.out + (warp % SLOTS * 8 + head) * OUT_PITCH + dim;
          *sum = turn ? *sum + x : x;
        }
    __syncthreads();
  }
  if (thread < 8) {
    float x = 0.0f, top = MASKED;
    for (int i = 0; i < WARPS; i++) { x += shared.total[i * 8 + thread]; top = fmaxf(top, shared.m[i * 8 + thread]); }
    weights[thread] = top;
    weights[ROWS + thread] = x;
  }
  for (int i = thread; i < 8 * D; i += THREADS) {
    float x = 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot++) x += shared.out[(slot * 8 + i / D) * OUT_PITCH + i % D];
    partial[i] = x;
  }
  __syncthreads();
}
// Exact keys, [sink | recent]: places past the sequence or listed twice are masked, blocks of 0 are not held.
struct Band { const u16* band; const int* blocks; int stride_b, stride_t; };
__device__ __forceinline__ void attend_band(const Band& band, const Query* query, int query_stride_h, int seq_len, int window,
                                            float to_log2, float cap, const Results& shared, float* weights,
                                            float* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  // heads in columns: the lane's of head `row`
  u32 q[D / 8][QUERY_TERMS];
#pragma unroll
  for (int i = 0; i < D / 32; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const Query* x = query + min(row, GROUP - 1) * query_stride_h + 32 * i + 8 * quad + 2 * k;
      split_pair(number(x[0]), number(x[1]), q[4 * i + k]);
    }
  float m[2] = {MASKED, MASKED}, total[2] = {0, 0}, unused[4] = {0, 0, 0, 0}, out[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) out[i][k] = 0.0f;
  for (int tile = warp; tile * 16 < SINK + window; tile += WARPS) {
    const u16* tokens[2];
    bool is_key[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = 16 * tile + row + 8 * half, j = i < SINK ? i : seq_len - window + i - SINK;
      is_key[half] = i < SINK + window && j < seq_len && (i < SINK || j >= SINK);
      const int block = is_key[half] ? band.blocks[j / BAND_BLOCK] : 0;
      is_key[half] = block > 0;
      tokens[half] = band.band + (long long)block * band.stride_b + (is_key[half] ? j % BAND_BLOCK * band.stride_t : 0) + 8 * quad;
    }
    uint4 key[2][D / 32], value[2][D / 32];
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < D / 32; i++) {
        // what is not held may be anything, and is not read
        const uint4 zero = {0, 0, 0, 0};
        key[half][i] = is_key[half] ? __ldg((const uint4*)(tokens[half] + 32 * i)) : zero;
        value[half][i] = is_key[half] ? __ldg((const uint4*)(tokens[half] + D + 32 * i)) : zero;
      }
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < D / 32; i++)
#pragma unroll
      for (int term = 0; term < QUERY_TERMS; term++) {
        multiply_bf16(c, key[0][i].x, key[1][i].x, key[0][i].y, key[1][i].y, q[4 * i][term], q[4 * i + 1][term]);
        multiply_bf16(c, key[0][i].z, key[1][i].z, key[0][i].w, key[1][i].w, q[4 * i + 2][term], q[4 * i + 3][term]);
      }
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
      const u32 v0 = transpose(value[0][i].x), v1 = transpose(value[0][i].y), v2 = transpose(value[1][i].x), v3 = transpose(value[1][i].y);
      const u32 v4 = transpose(value[0][i].z), v5 = transpose(value[0][i].w), v6 = transpose(value[1][i].z), v7 = transpose(value[1][i].w);
#pragma unroll
      for (int term = 0; term < WEIGHT_TERMS; term++) {
        multiply_bf16(out[2 * i], v0, v1, v2, v3, b[0][term], b[1][term]);
        multiply_bf16(out[2 * i + 1], v4, v5, v6, v7, b[0][term], b[1][term]);
      }
    }
  }
  merge_warps<true>(shared, m, total, out, weights, partial);
}
__device__ __forceinline__ int num_chunks(int seq_len) { return (seq_len + 63) / 64; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_history(
    const u16* folded, const float* row_scales, const u8* cache, const u32* table, const int* block_table,
    const int* band_table, const int* seq_lens, const int* prompt_lens, const Query* query, const u16* band, float* partial,
    float* weights, int* parts, int num_requests, int block_stride_16, int head_stride_16, int block_table_stride,
    int band_table_stride, int query_stride_t, int query_stride_h, int band_stride_b, int band_stride_h, int band_stride_t,
    int scale_bits, int cap_bits) {
  DYNAMIC_SHARED(u32, book);
  float* const results = (float*)(book + BOOK_WORDS);
  const Results shared = {results, results + WARPS * 8, results + WARPS * 16};
  int* const starts = (int*)(results + WARPS * 16 + SLOTS * 8 * OUT_PITCH);
  __shared__ int warp_sums[WARPS];
  const int ctas = gridDim.x, cta = blockIdx.x, h = blockIdx.y;
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
  int line = 0;
  for (int first = 0; first < num_requests; first += THREADS) {
    const int r = first + thread, chunks = r < num_requests ? num_chunks(seq_lens[r]) : 0;
    const int own = chunks > 0 ? BAND_COST + chunks + SEGMENT_COST : 0;
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
    if (r < num_requests) starts[r] = line + sum - own;
    line += all;
    __syncthreads();
  }
  if (thread == 0) starts[num_requests] = line;
#pragma unroll
  for (int i = 0; i < BOOK_LOADS; i++)
    if (i * THREADS + thread < STEPS * 256)
#pragma unroll
      for (int copy = 0; copy < COPIES; copy++) ((uint4*)book)[(i * THREADS + thread) * COPIES + copy] = words[i];
  __syncthreads();
  // CTA of unit u is ((u + 1) ctas − 1) / line, as CTA c begins at c line / ctas
  if (cta == 0 && h == 0)
    for (int r = thread; r < num_requests; r += THREADS) {
      const long long start = starts[r] + BAND_COST, end = starts[r + 1];
      const int first = end > start ? (int)(((start + 1) * ctas - 1) / line) : 0;
      parts[r] = first + r;
      parts[num_requests + r] = end > start ? (int)((end * ctas - 1) / line) - first + 1 : 0;
    }
  const int line_end = (int)((long long)(cta + 1) * line / ctas);
  int place = (int)((long long)cta * line / ctas), r = 0;
  if (place >= line_end) return;
  // the last request that begins at or before our place
  for (int high = num_requests; high - r > 1;) {
    const int middle = (r + high) / 2;
    if (starts[middle] <= place) r = middle; else high = middle;
  }
  const u8* head_cache = cache + (long long)h * head_stride_16 * 16;
  const u32 lane_book = shared_address(book) + row * COPIES / 8 * 16 + quad * 4;
  const float scale = __int_as_float(scale_bits), cap = __int_as_float(cap_bits);
#if HAS_CAP
  const float to_log2 = 1.0f;
#else
  const float to_log2 = LOG2E;
#endif

  // 3. segments
  for (; place < line_end; r++, place = starts[r]) {
    const int seq_len = seq_lens[r];
    if (seq_len <= 0) continue;
    const int window = seq_len <= prompt_lens[r] ? PROMPT_RECENT : RECENT;
    const long long pair = (long long)r * gridDim.y + h, part = (long long)h * (ctas + num_requests) + cta + r;
    const int* band_blocks = band_table + (long long)r * band_table_stride;
    if (place == starts[r]) {
      const long long band_part = (long long)gridDim.y * (ctas + num_requests) + pair;
      attend_band({band + (long long)h * band_stride_h, band_blocks, band_stride_b, band_stride_t},
                  query + (long long)r * query_stride_t + (long long)h * GROUP * query_stride_h, query_stride_h, seq_len,
                  window, scale * to_log2, cap, shared, weights + band_part * 2 * ROWS, partial + band_part * ROWS * D);
    }
    const int history = starts[r] + BAND_COST, units = starts[r + 1] - history, chunks = units - SEGMENT_COST;
    if (line_end <= history) continue;
    const int first_chunk = (int)((long long)max(place - history, 0) * chunks / units);
    const int end_chunk = (int)((long long)(min(line_end, starts[r + 1]) - history) * chunks / units);
    // B fragments of the query: heads in columns
    u32 q[STEPS][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 planes[2][STEPS / 2];
#pragma unroll
      for (int k = 0; k < 2; k++)
        load_words(planes[k], folded + pair * ROWS * D + ((2 * i + k) * ROWS + row) * GROUPS + quad * STEPS);
#pragma unroll
      for (int step = 0; step < STEPS; step++)
        q[step][i] = __byte_perm(planes[0][step / 2], planes[1][step / 2], step % 2 ? 0x7632 : 0x5410);
    }
    float row_scale[2], row_offset[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row_scale[i] = row_scales[pair * 2 * ROWS + 2 * quad + i] * scale * to_log2;
      row_offset[i] = row_scales[pair * 2 * ROWS + ROWS + 2 * quad + i] * scale * to_log2;
    }
    float m[2] = {MASKED, MASKED}, total[2] = {0, 0};
    float out[TILES][4], value_total[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) out[i][k] = 0.0f;

    const int* blocks = block_table + (long long)r * block_table_stride;
    int chunk = first_chunk + warp, until_centred = CENTRED_CHUNKS;
    const u8* block = chunk < end_chunk ? head_cache + (long long)blocks[chunk / 2] * block_stride_16 * 16 : head_cache;
    // a tile's indices are loaded when those of the chunk before it have been used
    u32 indices[4][2][STEPS / 4];
    if (chunk < end_chunk)
#pragma unroll
      for (int tile = 0; tile < 4; tile++) load_indices(indices[tile], block, chunk % 2 * 64 + 16 * tile + row, quad);
    while (chunk < end_chunk) {
      const int first = chunk % 2 * 64, start = 64 * chunk, following = chunk + WARPS;
      const u8* next_block =
          following < end_chunk ? head_cache + (long long)blocks[following / 2] * block_stride_16 * 16 : block;
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
#pragma unroll
        for (int k = 0; k < 4; k++) c[tile][k] = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          u32 a[4];
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const u32 address = dot_bytes(indices[tile][half][step / 4], (16 * COPIES) << (8 * (step % 4)), lane_book);
            unpack_bytes<E5M2 ? 5 : 4>(load_shared(address + step * 4096 * COPIES), a[half], a[half + 2]);
          }
          multiply(c[tile], a[0], a[1], a[2], a[3], q[step][0], q[step][1]);
        }
        if (following < end_chunk) load_indices(indices[tile], next_block, following % 2 * 64 + 16 * tile + row, quad);
        // the next chunk's values and scales come as far as L2
        if (tile == 0 && following < end_chunk)
          for (int i = lane; i < VALUE_LINES + 2; i += 32)
            prefetch(next_block + 128 * GROUPS + (i < VALUE_LINES ? following % 2 * 16 * D + i * 128
                                                                  : 32 * D + (i - VALUE_LINES) * 256 + following % 2 * 128));
      }
      // 2. scale, mask, maximum
      const bool is_open = start >= SINK && start + 64 <= seq_len - window;
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
          const int j = start + row + 8 * i;
          bool is_key = j < seq_len;
          if (is_key && (j < SINK || j >= seq_len - window)) is_key = band_blocks[j / BAND_BLOCK] == 0;
          // memory past the end may hold anything
          s[i] = is_key ? bf16_of(s_words[i / 2], i % 2) : 0.0f;
          float* x = &c[i / 2][2 * (i % 2)];
          if (is_key) scale_logits(x, bf16_of(rho_words[i / 2], i % 2), log2_scale(s[i]), row_scale, row_offset, cap, top);
          else x[0] = x[1] = __int_as_float(0xFF800000);
        }
      }
      raise_maximum(top, m, total, value_total, out);
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
      if (--until_centred == 0) { centre(out, value_total); until_centred = CENTRED_CHUNKS; }
    }
    centre(out, value_total);

    merge_warps<false>(shared, m, total, out, weights + part * 2 * ROWS, partial + part * ROWS * D);
  }
}
