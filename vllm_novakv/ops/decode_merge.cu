// The third launch of ops/decode_cuda.py: the partial results of a request by log-sum-exp, the history's by R_V^T, the
// learned sink.
//
// Grid (requests in tiles of up to 16 rows, KV head). A team of 16 threads has a row's dims; where the rows are fewer than
// 16, several teams share a row's parts, each with a softmax of its own. R_V^T is there before the parts are. No
// launch begins before this one has ended: what it writes may be the next one's query.
//
// Macros: those of decode_common.cuh, PADDED group, a power of two; REQUESTS and MERGE_THREADS of a CTA, HAS_SINKS,
// SINK_TYPE and OUTPUT_TYPE as TYPE.

#define THREADS MERGE_THREADS
#define MERGED_ROWS (REQUESTS * PADDED)
#define TEAMS (THREADS / 16 / MERGED_ROWS)
#define VECTORS (D / 64)
#define PITCH (D + 8)
// bf16 terms of a sum and of a transform; a 16-bit result does not show the third
#define TERMS (OUTPUT_TYPE == 0 ? 3 : 2)

// A request's parts: the band's, then the history's, of workers, of CTAs, of workers; each kind's are neighbours.
struct Parts {
  // part i of those below ends[k], and of no kind before, is entry i + shifts[k]
  int ends[4], shifts[4];
  __device__ __forceinline__ void append(int kind, long long first, int count) {
    const int begin = kind ? ends[kind - 1] : 0;
    ends[kind] = begin + count;
    shifts[kind] = (int)first - begin;
  }
  __device__ __forceinline__ int num_band() const { return ends[0]; }
  __device__ __forceinline__ int count() const { return ends[3]; }
  __device__ __forceinline__ int entry(int i) const {
    return i + (i < ends[0] ? shifts[0] : i < ends[1] ? shifts[1] : i < ends[2] ? shifts[2] : shifts[3]);
  }
};
__device__ __forceinline__ Parts parts_of(const Line& line, const Request& request, int start, int r, int h, int heads,
                                          int ctas, int num_requests) {
  const int history = start + request.band_units(), end = history + request.history_units();
  const long long band_entry = worker_entry(false, h, heads, ctas, num_requests) + r;
  const long long history_entry = worker_entry(true, h, heads, ctas, num_requests) + r;
  const int first_band = line.worker_at(start), last_band = line.worker_at(history - 1);
  const int first = line.worker_at(history), last = line.worker_at(end - 1);
  int first_cta = first / WARPS, last_cta = last / WARPS;
  if (!line.is_within(first_cta, history, end)) first_cta++;
  if (!line.is_within(last_cta, history, end)) last_cta--;
  const bool has_ctas = first_cta <= last_cta;
  const int end_first = has_ctas ? max(first, first_cta * WARPS) : last + 1;
  const int first_last = has_ctas ? (last_cta + 1) * WARPS : last + 1;
  Parts parts;
  parts.append(0, band_entry + first_band, last_band - first_band + 1);
  parts.append(1, history_entry + first, end_first - first);
  parts.append(2, cta_entry(h, heads, ctas, num_requests) + first_cta, has_ctas ? last_cta - first_cta + 1 : 0);
  parts.append(3, history_entry + first_last, max(last - first_last + 1, 0));
  return parts;
}
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

extern "C" __global__ void __launch_bounds__(THREADS) decode_merge(
    const float* partial, const float* weights, const int* starts, const uint4* rotation_terms, const Sink* sinks,
    const int* seq_lens, const int* prompt_lens, void* output, int num_requests, int ctas, int output_stride_t,
    int output_stride_h) {
  __shared__ float sums[2][THREADS / 16][PITCH];
  __shared__ float tops[THREADS / 16], totals[THREADS / 16], denominators[16];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  const int h = blockIdx.y, heads = gridDim.y;
  // the first 8 warps rotate
  Matrix matrix(rotation_terms, h, warp % 8, lane);
  matrix.load(0);
  let_arrive(matrix.bits());
  wait_for_previous_launch();

  // 1. a team's parts; what is not history needs no rotation
  const int team = thread / 16, m = team / TEAMS, share = team % TEAMS, member = thread % 16;
  const int r = blockIdx.x * REQUESTS + m / PADDED, head = m % PADDED;
  const int seq_len = head < GROUP && r < num_requests ? seq_lens[r] : 0;
  Parts parts = {};
  if (seq_len > 0)
    parts = parts_of(make_line(starts[num_requests], ctas), request_of(seq_len, prompt_lens[r]), starts[r], r, h, heads, ctas,
                     num_requests);
  const int num_band = parts.num_band(), num_parts = parts.count();
  float top = MASKED, total = 0.0f;
#if HAS_SINKS
  if (seq_len > 0 && share == 0) {
    top = sink_logit(sinks[h * GROUP + head]) * LOG2E;
    total = 1.0f;
  }
#endif
  float4 sum[2][VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) sum[0][v] = sum[1][v] = {0, 0, 0, 0};
#pragma unroll 4
  for (int i = share; i < num_parts; i += TEAMS) {
    const long long entry = parts.entry(i);
    const float* weight = weights + entry * 2 * GROUP + head;
    const float4* values = (const float4*)(partial + (entry * GROUP + head) * D) + member;
    const float part_total = weight[GROUP], part_top = part_total > 0.0f ? weight[0] : MASKED;
    const float larger = fmaxf(top, part_top), decay = exp2_fast(top - larger);
    const float factor = part_total > 0.0f ? exp2_fast(part_top - larger) : 0.0f;
    const float of_band = i < num_band ? factor : 0.0f, of_history = factor - of_band;
    top = larger;
    total = total * decay + part_total * factor;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const float4 x = values[16 * v];
      float4 &y = sum[0][v], &z = sum[1][v];
      y = {y.x * decay + of_band * x.x, y.y * decay + of_band * x.y, y.z * decay + of_band * x.z, y.w * decay + of_band * x.w};
      z = {z.x * decay + of_history * x.x, z.y * decay + of_history * x.y, z.z * decay + of_history * x.z,
           z.w * decay + of_history * x.w};
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
  if (warp >= 8) return;
  // 3. rotate
  float c[2][COLUMN_TILES][4];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) c[0][j][k] = c[1][j][k] = 0.0f;
#pragma unroll
  for (int part = 0; part < MATRIX_LOADS / MATRIX_AHEAD; part++) {
    if (part > 0) matrix.load(part);
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
