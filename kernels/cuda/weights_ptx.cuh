// The instructions that C++ has no words for: asynchronous copies, tensor cores.
#pragma once

#include "fp8_device.cuh"

namespace ixt {

// 16 bytes of global memory into shared memory; zeros where not `inside`, and nothing is read.
__device__ __forceinline__ void copy16(void* shared, const void* global, bool inside) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(bytes)
               : "memory");
}

// Four bytes.
__device__ __forceinline__ void copy4(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

// What was copied since the last call is a group.
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Pending>
__device__ __forceinline__ void wait_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Wait until at most `pending` of this thread's groups, 0 to 6, are under way.
__device__ __forceinline__ void wait_copies(int pending) {
  switch (pending) {
    case 0: return wait_but<0>();
    case 1: return wait_but<1>();
    case 2: return wait_but<2>();
    case 3: return wait_but<3>();
    case 4: return wait_but<4>();
    case 5: return wait_but<5>();
    default: return wait_but<6>();
  }
}

// sum (16, 8) += a (16, 16) @ b (16, 8), pairs of T in each word, fp32 sums.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// (a & mask) ^ flip, in one instruction: the compiler takes two where both are constants.
__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t mask, uint32_t flip) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(a), "r"(mask), "r"(flip));
  return result;
}

// Two FP8 codes as two fp16 numbers.
template <typename Format>
__device__ __forceinline__ uint32_t halves_of(uint32_t pair) {
  if constexpr (Format::mantissa == 2) {
    return __byte_perm(pair, 0, 0x1404);  // e5m2 is the upper byte of fp16
  } else {
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    return halves;
#else
    const float2 v = decode_pair<Format>(pair);
    return pack_pair<f16>(v.x, v.y);
#endif
  }
}

}  // namespace ixt
