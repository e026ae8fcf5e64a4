// The third launch of ops/decode_cuda.py: the partial results of a request by log-sum-exp, the history's by R_V^T, the
// learned sink.
//
// Grid (requests in tiles of up to 16 rows, KV head). 16 threads have a row's dims; where the rows are fewer than 16,
// several such teams share a row's parts. R_V^T is there before the parts are.
//
// Macros: those of decode_common.cuh, PADDED group, a power of two; REQUESTS of a CTA, HAS_SINKS, SINK_TYPE and OUTPUT_TYPE
// as TYPE.

#define THREADS 256
#define MERGED_ROWS (REQUESTS * PADDED)
#define TEAMS (16 / MERGED_ROWS)
#define VECTORS (D / 64)
#define PITCH (D + 4)
#define COLUMN_TILES (D / 64)
// bf16 terms of a sum and of a transform; a 16-bit result does not show the third
#define TERMS (OUTPUT_TYPE == 0 ? 3 : 2)

// parts of one kind that are neighbours
struct Run { long long first; int count; };
// band; history of workers, of CTAs, of workers
struct Parts {
  Run runs[4];
  __device__ __forceinline__ int total() const { return runs[0].count + runs[1].count + runs[2].count + runs[3].count; }
  __device__ __forceinline__ long long entry(int i) const {
#pragma unroll
    for (int k = 0; k < 3; k++) {
      if (i < runs[k].count) return runs[k].first + i;
      i -= runs[k].count;
    }
    return runs[3].first + i;
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
  Parts parts;
  parts.runs[0] = {band_entry + first_band, last_band - first_band + 1};
  if (first_cta > last_cta) {
    parts.runs[1] = {history_entry + first, last - first + 1};
    parts.runs[2] = parts.runs[3] = {0, 0};
  } else {
    parts.runs[1] = {history_entry + first, max(first_cta * WARPS - first, 0)};
    parts.runs[2] = {cta_entry(h, heads, ctas, num_requests) + first_cta, last_cta - first_cta + 1};
    parts.runs[3] = {history_entry + (last_cta + 1) * WARPS, max(last - (last_cta + 1) * WARPS + 1, 0)};
  }
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
    const float* partial, const float* weights, const int* starts, const float* rotation, const Sink* sinks,
    const int* seq_lens, const int* prompt_lens, void* output, int num_requests, int ctas, int output_stride_t,
    int output_stride_h) {
  __shared__ float sums[2][16][PITCH];
  __shared__ float denominators[16];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  const int h = blockIdx.y, heads = gridDim.y;
  const float* matrix = rotation + ((long long)h * D + warp * 8 * COLUMN_TILES + row) * D + 4 * quad;
  constexpr int AHEAD = D <= 128 ? STEPS : 2;
  float4 loaded[COLUMN_TILES][AHEAD];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int step = 0; step < AHEAD; step++) loaded[j][step] = __ldg((const float4*)(matrix + 8 * j * D + 16 * step));
  wait_for_previous_launch();
  let_next_launch_begin();

  // 1. the row's parts: their largest logit and their sum of weights
  const int team = thread / 16, m = team / TEAMS, share = team % TEAMS, member = thread % 16;
  const int r = blockIdx.x * REQUESTS + m / PADDED, head = m % PADDED;
  const int seq_len = head < GROUP && r < num_requests ? seq_lens[r] : 0;
  Parts parts = {};
  if (seq_len > 0)
    parts = parts_of(make_line(starts[num_requests], ctas), request_of(seq_len, prompt_lens[r]), starts[r], r, h, heads, ctas,
                     num_requests);
  const int num_parts = parts.total();
  float top = MASKED, total = 0.0f;
  for (int i = member; i < num_parts; i += 16) {
    const float* weight = weights + parts.entry(i) * 2 * GROUP + head;
    const float x = weight[GROUP], logit = x > 0.0f ? weight[0] : MASKED, larger = fmaxf(top, logit);
    total = total * exp2_fast(top - larger) + x * exp2_fast(logit - larger);
    top = larger;
  }
#pragma unroll
  for (int lanes = 1; lanes < 16; lanes *= 2) {
    const float other_top = __shfl_xor_sync(0xFFFFFFFFu, top, lanes), other = __shfl_xor_sync(0xFFFFFFFFu, total, lanes);
    const float larger = fmaxf(top, other_top);
    total = total * exp2_fast(top - larger) + other * exp2_fast(other_top - larger);
    top = larger;
  }
#if HAS_SINKS
  if (seq_len > 0) {
    const float sink = sink_logit(sinks[h * GROUP + head]) * LOG2E, larger = fmaxf(top, sink);
    total = total * exp2_fast(top - larger) + exp2_fast(sink - larger);
    top = larger;
  }
#endif
  if (member == 0 && share == 0) denominators[m] = total > 0.0f ? total : 1.0f;
  // 2. their weighted values; what is not history needs no rotation
#pragma unroll
  for (int is_history = 0; is_history < 2; is_history++) {
    float4 sum[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) sum[v] = {0, 0, 0, 0};
    const int begin = is_history ? parts.runs[0].count : 0, end = is_history ? num_parts : parts.runs[0].count;
#pragma unroll 4
    for (int i = begin + share; i < end; i += TEAMS) {
      const long long entry = parts.entry(i);
      const float* weight = weights + entry * 2 * GROUP + head;
      const float factor = weight[GROUP] > 0.0f ? exp2_fast(weight[0] - top) : 0.0f;
      const float4* values = (const float4*)(partial + (entry * GROUP + head) * D) + member;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const float4 x = values[16 * v];
        sum[v].x += factor * x.x; sum[v].y += factor * x.y; sum[v].z += factor * x.z; sum[v].w += factor * x.w;
      }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; v++) *(float4*)&sums[is_history][team][4 * member + 64 * v] = sum[v];
  }
  __syncthreads();
#if TEAMS > 1
  for (int i = thread; i < 2 * MERGED_ROWS * D; i += THREADS) {
    const int kind = i / (MERGED_ROWS * D), n = i / D % MERGED_ROWS, d = i % D;
    float x = 0.0f;
#pragma unroll
    for (int k = 0; k < TEAMS; k++) x += sums[kind][n * TEAMS + k][d];
    sums[kind][n * TEAMS][d] = x;
  }
  __syncthreads();
#endif
  // 3. rotate
  float c[COLUMN_TILES][4];
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) c[j][k] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 a[2][2][TERMS];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float4 x = {0, 0, 0, 0};
      if (row + 8 * half < MERGED_ROWS) x = *(const float4*)&sums[1][(row + 8 * half) * TEAMS][16 * step + 4 * quad];
      split_pair(x.x, x.y, a[half][0]);
      split_pair(x.z, x.w, a[half][1]);
    }
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++) {
      const float4 y = step < AHEAD ? loaded[j][step % AHEAD] : __ldg((const float4*)(matrix + 8 * j * D + 16 * step));
      u32 b[2][TERMS];
      split_pair(y.x, y.y, b[0]);
      split_pair(y.z, y.w, b[1]);
#pragma unroll
      for (int s = 0; s < TERMS; s++)
#pragma unroll
        for (int t = 0; t < TERMS - s; t++)
          multiply_bf16(c[j], a[0][0][s], a[1][0][s], a[0][1][s], a[1][1][s], b[0][t], b[1][t]);
    }
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
      const float x = (c[j][2 * half] + sums[0][n * TEAMS][column]) * factor;
      const float y = (c[j][2 * half + 1] + sums[0][n * TEAMS][column + 1]) * factor;
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
