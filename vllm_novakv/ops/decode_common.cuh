// What the launches of ops/decode_cuda.py share: tensor-core products of bf16 terms, and the line of work.
//
// The requests of a batch stand in one line, each with its band and its history, in units of time; the workers of a KV
// head share it evenly, whatever the requests' lengths. A worker's part of a request's band, and of its history, is one
// partial result, entry worker + request of the head. Where a CTA has nothing but one request's history, its workers
// merge their results, and the entry is the CTA's.
//
// Macros: that of cuda_common.cuh, D head size, FORMAT of centroids (0 e4m3, 1 e5m2, 2 integers), GROUP query heads of a KV head, WARPS of a CTA of the second
// launch, each a worker; CHUNK tokens of history that it takes at a time, 32 or 64; SINK, RECENT, PROMPT_RECENT tokens of the band.

#define STEPS (D / 16)
#define MASKED (-1.0e30f)
#define LOG2E 1.4426950408889634f
// queries are integers up to this, of an upper and a lower byte, where centroids are integers
#define QUERY_LEVELS 32639.0f
#define BAND_TILE 16
// units of time: what a chunk of history and a tile of the band cost, and a request's band and history besides
#define CHUNK_UNITS (CHUNK / 2)
#define BAND_TILE_UNITS 40
#define BAND_UNITS 64
#define HISTORY_UNITS 64

#ifndef EMULATED
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float log2_fast(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 pack_half(float low, float high) {
  u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
#endif
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
// A [D, D] matrix as B operands of three bf16 terms, [D / 8 column tiles][words in fours][32 lanes][4], 6 words of a lane
// and step of 16 rows: of each term that of rows 2 quad, 2 quad + 1 and that of both + 8.
#define MATRIX_LOADS (STEPS * 6 / 4)
// loads that a lane's registers hold at a time, of COLUMN_TILES column tiles
#define MATRIX_AHEAD (D <= 128 ? MATRIX_LOADS : 6)
#define COLUMN_TILES (D / 64)
struct Matrix {
  const uint4* terms;
  uint4 words[COLUMN_TILES][MATRIX_AHEAD];
  // the part of a head's matrix that warp `warp` of 8 multiplies by
  __device__ __forceinline__ Matrix(const uint4* all, int h, int warp, int lane)
      : terms(all + ((h * (D / 8) + warp * COLUMN_TILES) * MATRIX_LOADS) * 32 + lane) {}
  __device__ __forceinline__ void load(int part) {
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int i = 0; i < MATRIX_AHEAD; i++)
        words[j][i] = load_ahead(terms + (j * MATRIX_LOADS + part * MATRIX_AHEAD + i) * 32);
  }
  // c += a b for what is loaded; a of row `row` and `row` + 8, float2 (step, lower or upper 8, half); TERMS terms of a, of
  // whose products with those of b the ones are taken that a sum of LEVELS terms shows
  template <int TERMS, int LEVELS, class Rows>
  __device__ __forceinline__ void multiply(float (&c)[2][COLUMN_TILES][4], int part, Rows rows) const {
    constexpr int PART_STEPS = MATRIX_AHEAD * 4 / 6;
#pragma unroll
    for (int step = 0; step < PART_STEPS; step++) {
      u32 a[2][2][TERMS];
#pragma unroll
      for (int upper = 0; upper < 2; upper++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 x = rows(part * PART_STEPS + step, upper, half);
          split_pair(x.x, x.y, a[upper][half]);
        }
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        u32 b[6];
#pragma unroll
        for (int i = 0; i < 6; i++)
          b[i] = word_of(words[j][(6 * step + i) / 4], (6 * step + i) % 4);
        // sums of even and of odd steps: two short chains
#pragma unroll
        for (int s = 0; s < TERMS; s++)
#pragma unroll
          for (int t = 0; t < LEVELS - s; t++)
            multiply_bf16(c[step % 2][j], a[0][0][s], a[0][1][s], a[1][0][s], a[1][1][s], b[2 * t], b[2 * t + 1]);
      }
    }
  }
};
typedef Number Query;
// one request: tiles of its band, [sink | recent], and the chunks of its history that are not all band
struct Request {
  int seq_len, window;
  __device__ __forceinline__ int first_recent() const { return max(SINK, seq_len - window); }
  __device__ __forceinline__ int band_tokens() const { return min(seq_len, SINK) + max(seq_len - first_recent(), 0); }
  __device__ __forceinline__ int band_tiles() const { return (band_tokens() + BAND_TILE - 1) / BAND_TILE; }
  __device__ __forceinline__ int first_chunk() const { return SINK / CHUNK; }
  __device__ __forceinline__ int end_chunk() const { return max(first_chunk(), (max(seq_len - window, 0) + CHUNK - 1) / CHUNK); }
  __device__ __forceinline__ int band_units() const { return BAND_UNITS + BAND_TILE_UNITS * band_tiles(); }
  __device__ __forceinline__ int history_units() const { return HISTORY_UNITS + CHUNK_UNITS * (end_chunk() - first_chunk()); }
};
__device__ __forceinline__ Request request_of(int seq_len, int prompt_len) {
  return {seq_len, seq_len <= prompt_len ? PROMPT_RECENT : RECENT};
}
// the first chunk, or tile of the band, at or after a unit of a request's history, or band
__device__ __forceinline__ int chunk_at(const Request& request, int unit) {
  return request.first_chunk() + max(unit - HISTORY_UNITS + CHUNK_UNITS - 1, 0) / CHUNK_UNITS;
}
__device__ __forceinline__ int tile_at(int unit) { return max(unit - BAND_UNITS + BAND_TILE_UNITS - 1, 0) / BAND_TILE_UNITS; }
// a line of so many units, of which each worker has a share
struct Line {
  int length, share, workers;
  __device__ __forceinline__ int start_of(int worker) const { return min(worker * share, length); }
  __device__ __forceinline__ int worker_at(int unit) const { return unit / share; }
  // whether a CTA has units of [start, end) alone
  __device__ __forceinline__ bool is_within(int cta, int start, int end) const {
    return (cta + 1) * WARPS <= workers && start_of(cta * WARPS) >= start && start_of((cta + 1) * WARPS) <= end;
  }
};
__device__ __forceinline__ Line make_line(int length, int ctas) {
  const int share = max(1, (length + ctas * WARPS - 1) / (ctas * WARPS));
  return {length, share, (length + share - 1) / share};
}
// entries of partial results: [band, history][KV head][worker + request], then [KV head][CTA]
__device__ __forceinline__ long long worker_entry(bool is_history, int h, int heads, int ctas, int num_requests) {
  return ((long long)is_history * heads + h) * (ctas * WARPS + num_requests);
}
__device__ __forceinline__ long long cta_entry(int h, int heads, int ctas, int num_requests) {
  return 2LL * heads * (ctas * WARPS + num_requests) + h * ctas;
}
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
// those of the first KV head
__device__ __forceinline__ Parts parts_of(const Line& line, const Request& request, int start, int r, int heads, int ctas,
                                          int num_requests) {
  const int history = start + request.band_units(), end = history + request.history_units();
  const long long band_entry = worker_entry(false, 0, heads, ctas, num_requests) + r;
  const long long history_entry = worker_entry(true, 0, heads, ctas, num_requests) + r;
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
  parts.append(2, cta_entry(0, heads, ctas, num_requests) + first_cta, has_ctas ? last_cta - first_cta + 1 : 0);
  parts.append(3, history_entry + first_last, max(last - first_last + 1, 0));
  return parts;
}
// the same of KV head h: those of a kind are as far apart as the workers, or CTAs, of a head
__device__ __forceinline__ Parts parts_of_head(const int4& ends, const int4& shifts, int h, int ctas, int num_requests) {
  const int apart = h * (ctas * WARPS + num_requests);
  return {{ends.x, ends.y, ends.z, ends.w}, {shifts.x + apart, shifts.y + apart, shifts.z + h * ctas, shifts.w + apart}};
}
