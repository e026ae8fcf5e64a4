// Runs a CUDA kernel on the CPU, one block after the other, every thread a fiber: for tests of a kernel's logic where
// there is no GPU. Warp operations and barriers hand the processor on until all of their threads have arrived.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DYNAMIC_SHARED(type, name) static type* const name = (type*)emulator::dynamic_shared

struct Index { int x, y, z; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct ushort4 { uint16_t x, y, z, w; };
struct int4 { int x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
using std::max;
using std::min;

namespace emulator {
alignas(16) inline char dynamic_shared[1 << 18];
struct Barrier {
  int arrived = 0, generation = 0;
};
struct Thread {
  ucontext_t context;
  Index index;
  bool is_done = false;
  std::vector<char> stack = std::vector<char>(64 * 1024);
};
inline std::vector<Thread> threads;
inline std::vector<Barrier> warp_barriers;
inline std::vector<uint32_t> exchange;  // 8 words a thread
inline Barrier block_barrier;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline int current;

inline void hand_on() { swapcontext(&threads[current].context, &scheduler); }
inline void wait(Barrier& barrier, int size) {
  const int generation = barrier.generation;
  if (++barrier.arrived == size) {
    barrier.arrived = 0;
    barrier.generation++;
  } else {
    while (barrier.generation == generation) hand_on();
  }
}
inline void wait_warp() { wait(warp_barriers[current / 32], 32); }
inline uint32_t* words(int thread) { return &exchange[8 * thread]; }
inline void run_thread() {
  body();
  threads[current].is_done = true;
  hand_on();
}
}  // namespace emulator

inline Index blockIdx, gridDim;
#define threadIdx (emulator::threads[emulator::current].index)

inline void __syncthreads() { emulator::wait(emulator::block_barrier, (int)emulator::threads.size()); }
template <class T> T __ldg(const T* p) { return *p; }
inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float((uint32_t)x); }
template <class T> T __shfl_xor_sync(unsigned, T value, int offset) {
  const int own = emulator::current;
  memcpy(emulator::words(own), &value, 4);
  emulator::wait_warp();
  T other;
  memcpy(&other, emulator::words(own ^ offset), 4);
  emulator::wait_warp();
  return other;
}
// a lane without one `offset` below keeps its own
template <class T> T __shfl_up_sync(unsigned, T value, int offset) {
  const int own = emulator::current;
  memcpy(emulator::words(own), &value, 4);
  emulator::wait_warp();
  T other = value;
  if (own % 32 >= offset) memcpy(&other, emulator::words(own - offset), 4);
  emulator::wait_warp();
  return other;
}
inline bool __any_sync(unsigned, bool value) {
  emulator::words(emulator::current)[0] = value;
  emulator::wait_warp();
  bool any = false;
  for (int i = 0; i < 32; i++) any |= emulator::words(emulator::current / 32 * 32 + i)[0] != 0;
  emulator::wait_warp();
  return any;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= (uint32_t)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}

// what the sources define themselves on a GPU
inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }
inline uint32_t half_bits(float x) { const _Float16 y = (_Float16)x; uint16_t bits; memcpy(&bits, &y, 2); return bits; }
inline uint32_t pack_half(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xFF) * (b >> i & 0xFF);
  return c;
}
inline uint32_t shared_address(const void* p) { return (uint32_t)((const char*)p - emulator::dynamic_shared); }
inline uint32_t load_shared(uint32_t address) { uint32_t x; memcpy(&x, emulator::dynamic_shared + address, 4); return x; }
// an 8-bit float with E exponent bits
template <int E> float of_byte(uint32_t x) {
  const int mantissa_bits = 7 - E, bias = (1 << (E - 1)) - 1, exponent = x >> mantissa_bits & ((1 << E) - 1);
  const float mantissa = (float)(x & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits);
  const float size = exponent ? std::ldexp(1 + mantissa, exponent - bias) : std::ldexp(mantissa, 1 - bias);
  return x & 0x80 ? -size : size;
}
template <int E> void unpack_bytes(uint32_t word, uint32_t& low, uint32_t& high) {
  low = pack_half(of_byte<E>(word & 0xFF), of_byte<E>(word >> 8 & 0xFF));
  high = pack_half(of_byte<E>(word >> 16 & 0xFF), of_byte<E>(word >> 24));
}
// 8x8 matrix of 16-bit elements: lane 4 i + j holds row i, columns 2 j and 2 j + 1
inline uint32_t transpose(uint32_t x) {
  const int lane = emulator::current % 32, warp = emulator::current - lane, row = lane / 4, quad = lane % 4;
  emulator::words(emulator::current)[0] = x;
  emulator::wait_warp();
  uint32_t result = 0;
  for (int i = 0; i < 2; i++)
    result |= (emulator::words(warp + 4 * (2 * quad + i) + row / 2)[0] >> 16 * (row % 2) & 0xFFFF) << 16 * i;
  emulator::wait_warp();
  return result;
}
inline float of_half(uint16_t x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
// m16n8k16, f32 += 16 bits * 16 bits
template <class Number>
void multiply_halves(float (&c)[4], const uint32_t (&operands)[6], Number number) {
  const int lane = emulator::current % 32, warp = emulator::current - lane, row = lane / 4, quad = lane % 4;
  memcpy(emulator::words(emulator::current), operands, sizeof operands);
  emulator::wait_warp();
  for (int i = 0; i < 4; i++) {
    const int column = 2 * quad + i % 2;
    for (int k = 0; k < 16; k++) {
      const int owner = k % 8 / 2, upper = k / 8, shift = 16 * (k % 2);
      const uint32_t x = emulator::words(warp + 4 * row + owner)[i / 2 + 2 * upper] >> shift;
      const uint32_t y = emulator::words(warp + 4 * column + owner)[4 + upper] >> shift;
      c[i] += number((uint16_t)x) * number((uint16_t)y);
    }
  }
  emulator::wait_warp();
}
// of f16
inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_halves(c, {a0, a1, a2, a3, b0, b1}, of_half);
}
// of bf16
inline void multiply_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_halves(c, {a0, a1, a2, a3, b0, b1}, [](uint16_t x) { return __uint_as_float((uint32_t)x << 16); });
}
// m16n8k32, s32 += s8 * s8
inline void multiply_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t operands[6] = {a0, a1, a2, a3, b0, b1};
  const int lane = emulator::current % 32, warp = emulator::current - lane, row = lane / 4, quad = lane % 4;
  memcpy(emulator::words(emulator::current), operands, sizeof operands);
  emulator::wait_warp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 32; k++) {
      const int owner = k % 16 / 4, upper = k / 16, shift = 8 * (k % 4);
      const int8_t x = emulator::words(warp + 4 * row + owner)[i / 2 + 2 * upper] >> shift;
      const int8_t y = emulator::words(warp + 4 * (2 * quad + i % 2) + owner)[4 + upper] >> shift;
      c[i] += x * y;
    }
  emulator::wait_warp();
}
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline void product(float (&c)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  for (float& x : c) x = 0.0f;
  multiply_bf16(c, a.x, a.y, a.z, a.w, b0, b1);
}
inline void prefetch(const void*) {}
inline void keep(uint32_t&) {}
inline uint4 load_ahead(const uint4* p) { return *p; }
inline void wait_for_previous_launch() {}
inline void let_next_launch_begin() {}
inline uint32_t pack_bf16(float low, float high) {
  // to the nearest, ties to even
  const auto rounded = [](float x) { const uint32_t y = __float_as_uint(x); return (y + 0x7FFF + (y >> 16 & 1)) >> 16; };
  return rounded(low) | rounded(high) << 16;
}

inline void launch(Index grid, int num_threads, std::function<void()> body) {
  emulator::body = body;
  gridDim = grid;
  for (int z = 0; z < grid.z; z++)
    for (int y = 0; y < grid.y; y++)
      for (int x = 0; x < grid.x; x++) {
        blockIdx = {x, y, z};
        emulator::threads = std::vector<emulator::Thread>(num_threads);
        emulator::warp_barriers.assign(num_threads / 32, {});
        emulator::exchange.assign(8 * num_threads, 0);
        emulator::block_barrier = {};
        for (int i = 0; i < num_threads; i++) {
          auto& thread = emulator::threads[i];
          thread.index = {i, 0, 0};
          getcontext(&thread.context);
          thread.context.uc_stack.ss_sp = thread.stack.data();
          thread.context.uc_stack.ss_size = thread.stack.size();
          thread.context.uc_link = nullptr;
          makecontext(&thread.context, emulator::run_thread, 0);
        }
        for (bool is_running = true; is_running;) {
          is_running = false;
          for (int i = 0; i < num_threads; i++) {
            if (emulator::threads[i].is_done) continue;
            is_running = true;
            emulator::current = i;
            swapcontext(&emulator::scheduler, &emulator::threads[i].context);
          }
        }
      }
}
