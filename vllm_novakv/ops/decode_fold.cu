// The first launch of ops/decode_cuda.py: q R_K^{-T} in fp16 relative to its largest element, and q·k̄.
//
// Grid (requests in tiles of 16 rows, FOLD_HEADS KV heads): few CTAs, as those of the second launch wait for their
// multiprocessors. A warp has D / 8 columns; R_K^{-T} is split into bf16 terms on the way.
// A lane's four k of a step are neighbours, for both operands alike. Padded rows of a batch are
// computed like others, and not used.
//
// Macros: those of decode_common.cuh, PADDED group, a power of two; FOLD_HEADS.

#define REQUESTS (16 / PADDED)
#define COLUMN_TILES (D / 64)
#define QUERY_TERMS (3 - TYPE)
#define MATRIX_TERMS 3

// a lane's columns of a row of the matrix
__device__ __forceinline__ void load_columns(float (&x)[COLUMN_TILES], const float* p) {
#if D == 64
  x[0] = __ldg(p);
#elif D == 128
  const float2 y = __ldg((const float2*)p);
  x[0] = y.x; x[1] = y.y;
#else
  const float4 y = __ldg((const float4*)p);
  x[0] = y.x; x[1] = y.y; x[2] = y.z; x[3] = y.w;
#endif
}
// four neighbours of a query
__device__ __forceinline__ float4 load_query(const Query* p) {
#if TYPE == 0
  return *(const float4*)p;
#else
  const uint2 x = *(const uint2*)p;
  return {number((u16)x.x), number((u16)(x.x >> 16)), number((u16)x.y), number((u16)(x.y >> 16))};
#endif
}

extern "C" __global__ void __launch_bounds__(256 * FOLD_HEADS) decode_fold(
    const Query* query, const float* mean, const float* inverse, u16* folded, float* row_scales,
    int num_requests, int query_stride_t, int query_stride_h) {
  // rows 16 bytes more than a multiple of 128, so that 8 of them lie on banks of their own
  __shared__ float4 all_queries[FOLD_HEADS][16][D / 4 + 1];
  __shared__ float all_largest[FOLD_HEADS][8][16];
  let_next_launch_begin();
  const int thread = threadIdx.x % 256, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  const int own_head = threadIdx.x / 256, h = blockIdx.y * FOLD_HEADS + own_head, heads = gridDim.y * FOLD_HEADS;
  float4 (&queries)[16][D / 4 + 1] = all_queries[own_head];
  float (&largest)[8][16] = all_largest[own_head];
  // all that comes from memory is asked for at once
  constexpr int QUERY_LOADS = 16 * D / 4 / 256;
  float4 loaded_query[QUERY_LOADS];
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; i++) {
    const int m = (i * 256 + thread) / (D / 4), r = blockIdx.x * REQUESTS + m / PADDED, head = m % PADDED;
    loaded_query[i] = {0, 0, 0, 0};
    if (head < GROUP && r < num_requests)
      loaded_query[i] = load_query(query + (long long)r * query_stride_t + (long long)(h * GROUP + head) * query_stride_h +
                                   thread % (D / 4) * 4);
  }
  const float* matrix = inverse + (long long)h * D * D + warp * 8 * COLUMN_TILES + row * COLUMN_TILES;
  // D = 256 has too many for the registers
  constexpr int AHEAD = D <= 128 ? STEPS : 2;
  float loaded[AHEAD][4][COLUMN_TILES];
  u32 bits = 0;
#pragma unroll
  for (int step = 0; step < AHEAD; step++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      load_columns(loaded[step][i], matrix + (16 * step + 4 * quad + i) * D);
      bits ^= __float_as_uint(loaded[step][i][0]);
    }
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; i++) queries[(i * 256 + thread) / (D / 4)][thread % (D / 4)] = loaded_query[i];
  let_arrive(bits);
  __syncthreads();

  // of even and of odd steps: two short chains
  float sums[2][COLUMN_TILES][4], offset[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) sums[0][j][k] = sums[1][j][k] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const int first = 16 * step + 4 * quad;
    const float4 k_mean = __ldg((const float4*)(mean + h * D + first));
    u32 a[2][2][QUERY_TERMS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float4 x = queries[row + 8 * half][4 * step + quad];
      offset[half] += x.x * k_mean.x + x.y * k_mean.y + x.z * k_mean.z + x.w * k_mean.w;
      split_pair(x.x, x.y, a[half][0]);
      split_pair(x.z, x.w, a[half][1]);
    }
    float y[4][COLUMN_TILES];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (step >= AHEAD) load_columns(y[i], matrix + (first + i) * D);
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++)
        if (step < AHEAD) y[i][j] = loaded[step % AHEAD][i][j];
    }
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      u32 b[2][MATRIX_TERMS];
      split_pair(y[0][j], y[1][j], b[0]);
      split_pair(y[2][j], y[3][j], b[1]);
#pragma unroll
      for (int s = 0; s < QUERY_TERMS; s++)
#pragma unroll
        for (int t = 0; t < MATRIX_TERMS - s; t++)
          multiply_bf16(sums[step % 2][j], a[0][0][s], a[1][0][s], a[0][1][s], a[1][1][s], b[0][t], b[1][t]);
    }
  }
  float c[COLUMN_TILES][4];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) c[j][k] = sums[0][j][k] + sums[1][j][k];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float top = 0.0f;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) top = fmaxf(top, fmaxf(fabsf(c[j][2 * half]), fabsf(c[j][2 * half + 1])));
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, lanes));
      offset[half] += __shfl_xor_sync(0xFFFFFFFFu, offset[half], lanes);
    }
    if (quad == 0) largest[warp][row + 8 * half] = top;
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int m = row + 8 * half, r = blockIdx.x * REQUESTS + m / PADDED, head = m % PADDED;
    if (head >= GROUP || r >= num_requests) continue;
    const long long pair = (long long)r * heads + h;
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, largest[i][row + 8 * half]);
    top = top > 0.0f ? top : 1.0f;
    if (warp == 0 && quad == 0) {
      row_scales[pair * 2 * GROUP + head] = top;
      row_scales[pair * 2 * GROUP + GROUP + head] = offset[half];
    }
    // the lane's columns are neighbours
    float x[2 * COLUMN_TILES];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int k = 0; k < 2; k++) x[k * COLUMN_TILES + j] = c[j][2 * half + k] / top;
    u32* target = (u32*)(folded + (pair * GROUP + head) * D + warp * 8 * COLUMN_TILES + 2 * quad * COLUMN_TILES);
#pragma unroll
    for (int i = 0; i < COLUMN_TILES; i++) target[i] = pack_half(x[2 * i], x[2 * i + 1]);
  }
}
