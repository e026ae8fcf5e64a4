// The third launch of ops/decode_cuda.py: the partial results of a request by log-sum-exp, the history's by R_V^T, the
// learned sink.
//
// Grid (requests in tiles of up to 16 rows, KV head). A team of 16 threads has a row's dims; where the rows are fewer than
// 16, several teams share a row's parts, each with a softmax of its own. In a small batch R_V^T is there before the parts are. No
// launch begins before this one has ended: what it writes may be the next one's query.
//
// Macros: those of decode_common.cuh, PADDED group, a power of two; REQUESTS of a CTA, IS_SMALL batch,
// HAS_SINKS, SINK_TYPE and OUTPUT_TYPE as TYPE.

#define THREADS 256
#define MERGED_ROWS (REQUESTS * PADDED)
#define TEAMS (THREADS / 16 / MERGED_ROWS)
#define VECTORS (D / 64)
// parts whose loads are under way together
#define AT_ONCE (IS_SMALL && D <= 128 ? 8 : 4)
#define PITCH (D + 8)
// bf16 terms of a sum and of a transform; a 16-bit result does not show the third
#define TERMS (OUTPUT_TYPE == 0 ? 3 : 2)

#if HAS_SINKS
#if SINK_TYPE == 0
typedef float Sink;
__device__ __forceinline__ float sink_logit(float x) { return x; }
#else
typedef u16 Sink;
__device__ __forceinline__ float sink_logit(u16 x) { return SINK_TYPE == 1 ? of_half(x) : __uint_as_float((u32)x << 16); }
#endif
#else
typedef void Sink;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, IS_SMALL || D > 128 ? 1 : 2) decode_merge(
    const float* partial, const float* weights, const int4* all_parts, const uint4* rotation_terms, const Sink* sinks,
    void* output, int num_requests, int ctas, int output_stride_t, int output_stride_h) {
  __shared__ float sums[2][THREADS / 16][PITCH];
  __shared__ float tops[THREADS / 16], totals[THREADS / 16], denominators[16];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  const int h = blockIdx.y;
  Matrix matrix(rotation_terms, h, warp, lane);
  // a small batch waits for it, a large one has no registers for it yet
  if (IS_SMALL) matrix.load(0);
  wait_for_previous_launch();

  // 1. a team's parts; what is not history needs no rotation
  const int team = thread / 16, m = team / TEAMS, share = team % TEAMS, member = thread % 16;
  const int r = blockIdx.x * REQUESTS + m / PADDED, head = m % PADDED;
  const bool is_row = head < GROUP && r < num_requests;
  Parts parts = {};
  if (is_row) parts = parts_of_head(all_parts[2 * r], all_parts[2 * r + 1], h, ctas, num_requests);
  const int num_band = parts.num_band(), num_parts = parts.count();
  float top = MASKED, total = 0.0f;
#if HAS_SINKS
  if (num_parts > 0 && share == 0) {
    top = sink_logit(sinks[h * GROUP + head]) * LOG2E;
    total = 1.0f;
  }
#endif
  float4 sum[2][VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) sum[0][v] = sum[1][v] = {0, 0, 0, 0};
  for (int first = share; first < num_parts; first += AT_ONCE * TEAMS) {
    float part_totals[AT_ONCE], part_tops[AT_ONCE];
    float4 x[AT_ONCE][VECTORS];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int i = first + k * TEAMS;
      // a part that there is not is the first one with a total of 0
      const long long entry = parts.entry(i < num_parts ? i : first);
      const float* weight = weights + entry * 2 * GROUP + head;
      const float4* values = (const float4*)(partial + (entry * GROUP + head) * D) + member;
      part_totals[k] = i < num_parts ? weight[GROUP] : 0.0f;
      part_tops[k] = weight[0];
#pragma unroll
      for (int v = 0; v < VECTORS; v++) x[k][v] = values[16 * v];
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const float part_top = part_totals[k] > 0.0f ? part_tops[k] : MASKED;
      const float larger = fmaxf(top, part_top), decay = exp2_fast(top - larger);
      const float factor = part_totals[k] > 0.0f ? exp2_fast(part_top - larger) : 0.0f;
      const float of_band = first + k * TEAMS < num_band ? factor : 0.0f, of_history = factor - of_band;
      top = larger;
      total = total * decay + part_totals[k] * factor;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const float4 own = x[k][v];
        float4 &y = sum[0][v], &z = sum[1][v];
        y = {y.x * decay + of_band * own.x, y.y * decay + of_band * own.y, y.z * decay + of_band * own.z,
             y.w * decay + of_band * own.w};
        z = {z.x * decay + of_history * own.x, z.y * decay + of_history * own.y, z.z * decay + of_history * own.z,
             z.w * decay + of_history * own.w};
      }
    }
  }
#pragma unroll
  for (int is_history = 0; is_history < 2; is_history++)
#pragma unroll
    for (int v = 0; v < VECTORS; v++) *(float4*)&sums[is_history][team][4 * member + 64 * v] = sum[is_history][v];
  if (member == 0) { tops[team] = top; totals[team] = total; }
  __syncthreads();
  // 2. the teams of a row
#if TEAMS > 1
  for (int i = thread; i < 2 * MERGED_ROWS * D; i += THREADS) {
    const int kind = i / (MERGED_ROWS * D), n = i / D % MERGED_ROWS, d = i % D;
    float largest = MASKED, x = 0.0f;
#pragma unroll
    for (int k = 0; k < TEAMS; k++) largest = fmaxf(largest, tops[n * TEAMS + k]);
#pragma unroll
    for (int k = 0; k < TEAMS; k++) x += exp2_fast(tops[n * TEAMS + k] - largest) * sums[kind][n * TEAMS + k][d];
    sums[kind][n * TEAMS][d] = x;
  }
#endif
  if (thread < MERGED_ROWS) {
    float largest = MASKED, x = 0.0f;
#pragma unroll
    for (int k = 0; k < TEAMS; k++) largest = fmaxf(largest, tops[thread * TEAMS + k]);
#pragma unroll
    for (int k = 0; k < TEAMS; k++) x += exp2_fast(tops[thread * TEAMS + k] - largest) * totals[thread * TEAMS + k];
    denominators[thread] = x > 0.0f ? x : 1.0f;
  }
  __syncthreads();
  // 3. rotate
  float c[2][COLUMN_TILES][4];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) c[0][j][k] = c[1][j][k] = 0.0f;
#pragma unroll
  for (int part = 0; part < MATRIX_LOADS / MATRIX_AHEAD; part++) {
    if (part > 0 || !IS_SMALL) matrix.load(part);
    matrix.multiply<TERMS, TERMS>(c, part, [&](int step, int upper, int half) {
      const int n = row + 8 * half;
      return n < MERGED_ROWS ? *(const float2*)&sums[1][n * TEAMS][16 * step + 8 * upper + 2 * quad] : float2{0, 0};
    });
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int n = row + 8 * half, own = blockIdx.x * REQUESTS + n / PADDED, own_head = n % PADDED;
    if (n >= MERGED_ROWS || own_head >= GROUP || own >= num_requests) continue;
    const long long place = (long long)own * output_stride_t + (long long)(h * GROUP + own_head) * output_stride_h;
    const float factor = 1.0f / denominators[n];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      const int column = (warp * COLUMN_TILES + j) * 8 + 2 * quad;
      const float x = (c[0][j][2 * half] + c[1][j][2 * half] + sums[0][n * TEAMS][column]) * factor;
      const float y = (c[0][j][2 * half + 1] + c[1][j][2 * half + 1] + sums[0][n * TEAMS][column + 1]) * factor;
#if OUTPUT_TYPE == 0
      *(float2*)((float*)output + place + column) = {x, y};
#elif OUTPUT_TYPE == 1
      *(u32*)((u16*)output + place + column) = pack_half(x, y);
#else
      *(u32*)((u16*)output + place + column) = pack_bf16(x, y);
#endif
    }
  }
}
