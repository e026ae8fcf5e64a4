// Nearest centroids and scales of transformed keys, for compute capability 8.0 and up: the second launch of ops/store.py.
//
// Grid (tile of 16 TILES tokens, KV head); a warp takes GROUPS / WARPS neighbouring groups for all tokens of the tile. The
// scores x·c − ‖c‖²/2 of 16 tokens against 8 centroids of a group are one tensor-core product m16n8k8: a key
// has four elements per group, so k = 8 holds them twice, x = high + low in two tf32 terms, against the same centroid,
// whose 8-bit float elements are exact in tf32. A score thus has nearly f32's precision. ‖c‖²/2 starts the accumulator.
//
// Lane = 4 row + quad: a lane holds element `quad` of tokens row and row + 8, and scores of centroids 2 quad, 2 quad + 1.
//
// Macros: D head size, TILES, WARPS.

#define GROUPS (D / 4)
#define PER_WARP (GROUPS / WARPS)
#define TOKENS (16 * TILES)

extern "C" __global__ void __launch_bounds__(32 * WARPS) store_search(
    const float* keys, u8* cache, const long long* slots, const float* centroids, const float* half_norms, int num_slots,
    int block_stride_16, int head_stride_16) {
  __shared__ float scale[TOKENS], energies[WARPS][TOKENS], products[WARPS][TOKENS];
  const int h = blockIdx.y, heads = gridDim.y, first = blockIdx.x * TOKENS;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row = lane / 4, quad = lane % 4;
  // 1. ρ = ‖r‖ / √d
  for (int i = warp; i < TOKENS; i += WARPS) {
    const int token = first + i;
    float sum = 0.0f;
    if (token < num_slots) {
      const float* key = keys + ((long long)token * heads + h) * D;
      for (int k = lane; k < D; k += 32) sum += key[k] * key[k];
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    const float norm = sqrtf(sum / D);
    if (lane == 0) scale[i] = norm == 0.0f ? 1.0f : norm;
  }
  __syncthreads();

  float product[2 * TILES], energy[2 * TILES];
  u64 packed[2 * TILES];
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) { product[i] = 0.0f; energy[i] = 0.0f; packed[i] = 0; }
  for (int i = 0; i < PER_WARP; i++) {
    const int g = warp * PER_WARP + i;
    const float* group_centroids = centroids + ((long long)h * GROUPS + g) * 1024;
    const float2* group_norms = (const float2*)(half_norms + ((long long)h * GROUPS + g) * 256);
    float r[2 * TILES], best[2 * TILES];
    int index[2 * TILES];
    u32 a[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k = 2 * tile + half, place = 16 * tile + 8 * half + row, token = first + place;
        r[k] = token < num_slots ? keys[((long long)token * heads + h) * D + 4 * g + quad] : 0.0f;
        const float x = r[k] / scale[place];
        a[tile][half] = tf32(x);
        a[tile][half + 2] = tf32(x - __uint_as_float(a[tile][half]));
        best[k] = __int_as_float(0xFF800000);
        index[k] = 0;
      }
    // 2. nearest centroid, the first of equals
#pragma unroll 4
    for (int n = 0; n < 32; n++) {
      const u32 b = __float_as_uint(__ldg(group_centroids + 32 * n + lane));
      const float2 norms = __ldg(group_norms + 4 * n + quad);
      const int c0 = 8 * n + 2 * quad;
#pragma unroll
      for (int tile = 0; tile < TILES; tile++) {
        float c[4] = {-norms.x, -norms.y, -norms.x, -norms.y};
        multiply(c, a[tile], b, b);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int own = 2 * tile + k / 2;
          if (c[k] > best[own]) { best[own] = c[k]; index[own] = c0 + k % 2; }
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 2 * TILES; k++) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, best[k], offset);
        const int other_index = __shfl_xor_sync(0xFFFFFFFFu, index[k], offset);
        if (other > best[k] || (other == best[k] && other_index < index[k])) { best[k] = other; index[k] = other_index; }
      }
      const float c = __ldg(group_centroids + 4 * index[k] + quad);
      product[k] += r[k] * c;
      energy[k] += c * c;
      packed[k] |= (u64)index[k] << (8 * i);
    }
  }
  // 3. indices of the warp's groups, side by side
#pragma unroll
  for (int k = 0; k < 2 * TILES; k++) {
    const int place = 8 * k + row, token = first + place;
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      product[k] += __shfl_xor_sync(0xFFFFFFFFu, product[k], offset);
      energy[k] += __shfl_xor_sync(0xFFFFFFFFu, energy[k], offset);
    }
    if (quad == 0) {
      products[warp][place] = product[k];
      energies[warp][place] = energy[k];
      const long long slot = token < num_slots ? slots[token] : -1;
      if (slot >= 128) {
        u8* block = cache + ((slot / 128) * block_stride_16 + (long long)h * head_stride_16) * 16;
        u8* place_ptr = block + slot % 128 * GROUPS + warp * PER_WARP;
#if PER_WARP == 2
        *(unsigned short*)place_ptr = (unsigned short)packed[k];
#elif PER_WARP == 4
        *(u32*)place_ptr = (u32)packed[k];
#else
        *(u64*)place_ptr = packed[k];
#endif
      }
    }
  }
  __syncthreads();
  // 4. least-squares scale
  if (thread < TOKENS) {
    const int token = first + thread;
    const long long slot = token < num_slots ? slots[token] : -1;
    if (slot >= 128) {
      float sum = 0.0f, norm = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) { sum += products[i][thread]; norm += energies[i][thread]; }
      const float rho = sum / (norm == 0.0f ? 1.0f : norm);
      const int p = (int)(slot % 128);
      u8* block = cache + ((slot / 128) * block_stride_16 + (long long)h * head_stride_16) * 16;
      unsigned short* plane = (unsigned short*)(block + 128 * (GROUPS + D / 4));
      plane[scale_element(p)] = (unsigned short)scale_bits(rho);
    }
  }
}
