// Nearest centroids and scales of transformed keys, for compute capability 8.0 and up: the second launch of ops/store.py.
//
// Grid (tile of 16 TILES tokens, KV head); a warp takes GROUPS / WARPS neighbouring groups for all tokens of the tile.
//
// Macros: D head size, TILES, WARPS.

#define GROUPS (D / 4)
#define PER_WARP (GROUPS / WARPS)
#define TOKENS (16 * TILES)


extern "C" __global__ void __launch_bounds__(32 * WARPS, 2) store_search(
    const float* keys, u8* cache, const long long* slots, const u32* words, int num_slots, int block_stride_16,
    int head_stride_16) {
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
    float r[2 * TILES], x[1][2 * TILES], c[1][2 * TILES];
    int index[1][2 * TILES];
#pragma unroll
    for (int k = 0; k < 2 * TILES; k++) {
      const int place = 8 * k + row, token = first + place;
      r[k] = token < num_slots ? keys[((long long)token * heads + h) * D + 4 * g + quad] : 0.0f;
      x[0][k] = r[k] / scale[place];
    }
    // 2. nearest centroids
    nearest<1, TILES>(words + ((long long)h * GROUPS + g) * 1024, x, lane, index, c);
#pragma unroll
    for (int k = 0; k < 2 * TILES; k++) {
      product[k] += r[k] * c[0][k];
      energy[k] += c[0][k] * c[0][k];
      packed[k] |= (u64)index[0][k] << (8 * i);
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
