// What the store's and the decode's CUDA kernels share.
//
// Lane = 4 row + quad, as in tensor-core fragments. m16n8k16 takes two neighbouring elements in a word: A at (row, 2 quad),
// (row + 8, 2 quad), (row, 2 quad + 8), (row + 8, 2 quad + 8), B at (2 quad, row), (2 quad + 8, row), and gives C at
// (row, 2 quad), (row, 2 quad + 1), (row + 8, 2 quad), (row + 8, 2 quad + 1).
//
// Macro: TYPE of the model's numbers (0 f32, 1 f16, 2 bf16).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#ifndef EMULATED
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
__device__ __forceinline__ float of_half(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
// c += a b, m16n8k16 of bf16
__device__ __forceinline__ void multiply_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" : : "l"(p)); }
// A load of what no launch writes, ahead of a wait. Not __ldg: the compiler would put it behind.
__device__ __forceinline__ uint4 load_ahead(const uint4* p) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p));
  return x;
}
// A launch may begin before the one ahead of it has ended, and waits here for its results.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next launch may begin; it waits for this one's results.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif
#if TYPE == 0
typedef float Number;
#else
typedef u16 Number;
#endif
__device__ __forceinline__ float number(Number x) {
#if TYPE == 0
  return x;
#elif TYPE == 1
  return of_half(x);
#else
  return __uint_as_float((u32)x << 16);
#endif
}
// word i of four
__device__ __forceinline__ u32 word_of(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
