// What the two kernels of the store share: types, tensor-core products of tf32, bf16 rounding, the place of a scale.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define BF16_MAX 3.3895313892515355e38f

#ifndef EMULATED
__device__ __forceinline__ u32 tf32(float x) { u32 y; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)); return y; }
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// bits of x rounded to bf16, to nearest even
__device__ __forceinline__ u32 bf16_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
// the same of a scale, which stays finite
__device__ __forceinline__ u32 scale_bits(float x) { return bf16_bits(fminf(fmaxf(x, -BF16_MAX), BF16_MAX)); }
// element of a token in its block's scale planes
__device__ __forceinline__ int scale_element(int p) { return p / 64 * 64 + p % 8 * 8 + p % 64 / 8; }

