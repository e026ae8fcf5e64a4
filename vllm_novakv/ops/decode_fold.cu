// The first launch of ops/decode_cuda.py: q R_K^{-T} in fp16, or in integers of 16 bits, relative to its largest element,
// and q·k̄.
//
// Grid (requests in tiles of 16 rows, KV head). A warp has D / 8 columns. Its part of R_K^{-T} is there before the launch
// ahead, the store as a rule, has ended; then come the queries. Who waits for this launch finds the store's results, too.
// Padded rows of a batch are computed like others, and not used.
//
// Macros: those of decode_common.cuh, PADDED group, a power of two.

#define TILE_REQUESTS (16 / PADDED)
#define QUERY_TERMS (3 - TYPE)

// four neighbours of a query
__device__ __forceinline__ float4 load_query(const Query* p) {
#if TYPE == 0
  return *(const float4*)p;
#else
  const uint2 x = *(const uint2*)p;
  return {number((u16)x.x), number((u16)(x.x >> 16)), number((u16)x.y), number((u16)(x.y >> 16))};
#endif
}

extern "C" __global__ void __launch_bounds__(256, D <= 128 ? 2 : 1) decode_fold(
    const Query* query, const float* mean, const uint4* inverse_terms, u16* folded, float* row_scales,
    int num_requests, int query_stride_t, int query_stride_h) {
  // rows 32 bytes more than a multiple of 128, so that 4 of them lie on banks of their own
  __shared__ float queries[16][D + 8];
  __shared__ float largest[8][16];
  let_next_launch_begin();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  const int h = blockIdx.y, heads = gridDim.y;
  Matrix matrix(inverse_terms, h, warp, lane);
  matrix.load(0);
  wait_for_previous_launch();
  constexpr int QUERY_LOADS = 16 * D / 4 / 256;
  float4 loaded_query[QUERY_LOADS];
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; i++) {
    const int m = (i * 256 + thread) / (D / 4), r = blockIdx.x * TILE_REQUESTS + m / PADDED, head = m % PADDED;
    loaded_query[i] = {0, 0, 0, 0};
    if (head < GROUP && r < num_requests)
      loaded_query[i] = load_query(query + (long long)r * query_stride_t + (long long)(h * GROUP + head) * query_stride_h +
                                   thread % (D / 4) * 4);
  }
#pragma unroll
  for (int i = 0; i < QUERY_LOADS; i++) *(float4*)&queries[(i * 256 + thread) / (D / 4)][thread % (D / 4) * 4] = loaded_query[i];
  __syncthreads();

  float sums[2][COLUMN_TILES][4], offset[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) sums[0][j][k] = sums[1][j][k] = 0.0f;
#pragma unroll
  for (int part = 0; part < MATRIX_LOADS / MATRIX_AHEAD; part++) {
    if (part > 0) matrix.load(part);
    matrix.multiply<QUERY_TERMS, 3>(sums, part, [&](int step, int upper, int half) {
      const int k = 16 * step + 8 * upper + 2 * quad;
      const float2 x = *(const float2*)&queries[row + 8 * half][k];
      const float2 k_mean = __ldg((const float2*)(mean + h * D + k));
      offset[half] += x.x * k_mean.x + x.y * k_mean.y;
      return x;
    });
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
    const int m = row + 8 * half, r = blockIdx.x * TILE_REQUESTS + m / PADDED, head = m % PADDED;
    if (head >= GROUP || r >= num_requests) continue;
    const long long pair = (long long)r * heads + h;
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, largest[i][row + 8 * half]);
    top = top > 0.0f ? top : 1.0f;
#if FORMAT == 2
    const float unit = top / QUERY_LEVELS;
#else
    const float unit = top;
#endif
    if (warp == 0 && quad == 0) {
      row_scales[pair * 2 * GROUP + head] = unit;
      row_scales[pair * 2 * GROUP + GROUP + head] = offset[half];
    }
    u16* target = folded + (pair * GROUP + head) * D;
    const int column = warp * 8 * COLUMN_TILES + 2 * quad;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      const float x = c[j][2 * half] / unit, y = c[j][2 * half + 1] / unit;
#if FORMAT == 2
      // x = 256 upper + lower, both signed bytes: the upper ones of a row, then the lower ones
      const int own = __float2int_rn(x), next = __float2int_rn(y);
      const int upper = (own + 128) >> 8, next_upper = (next + 128) >> 8;
      u16* pair_of_columns = target + (column + 8 * j) / 2;
      pair_of_columns[0] = (u16)((upper & 0xFF) | next_upper << 8);
      pair_of_columns[D / 2] = (u16)((own & 0xFF) | next << 8);
#else
      *(u32*)(target + column + 8 * j) = pack_half(x, y);
#endif
    }
  }
}
