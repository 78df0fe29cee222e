// The instructions that C++ has no words for: asynchronous copies, tensor cores.
#pragma once

#include "fp8_device.cuh"

namespace ixt {

using Shared = uint32_t;  // an address in shared memory

__device__ __forceinline__ Shared shared_address(const void* shared) {
  uint32_t address;  // by hand: otherwise it is computed anew for every use
  asm volatile("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}"
               : "=r"(address)
               : "l"(shared));
  return address;
}

// 16 bytes of global memory into shared memory; zeros where not `inside`, and nothing is read.
__device__ __forceinline__ void copy16(Shared to, const void* global, bool inside) {
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
               "r"(bytes)
               : "memory");
}

// Four or eight bytes.
template <int Bytes>
__device__ __forceinline__ void copy_small(Shared to, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(Bytes)
               : "memory");
}

__device__ __forceinline__ void write_byte(Shared to, uint32_t byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(byte) : "memory");
}

__device__ __forceinline__ uint32_t read4(Shared from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint2 read8(Shared from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ uint4 read16(Shared from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

// What was copied since the last call is a group.
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `pending` of this thread's groups, 0 to 2, are under way. Written so that no
// table of jumps comes of it.
__device__ __forceinline__ void wait_copies(int pending) {
  asm volatile(
      "{.reg .pred none, one; setp.eq.s32 none, %0, 0; setp.eq.s32 one, %0, 1;\n\t"
      "@none cp.async.wait_group 0;\n\t@one cp.async.wait_group 1;\n\t"
      "cp.async.wait_group 2;}" ::"r"(pending)
      : "memory");
}

// A number that is kept, and not computed anew where it is used.
__device__ __forceinline__ int kept(int v) {
  int same;
  asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(v));
  return same;
}

// Wait for the other threads of a barrier that has `threads` of the block; whole warps.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Four matrices of 8 rows of 16 bytes: lane i has the address of row i % 8 of matrix i / 8, and
// gets the four bytes from 4 * (i % 4) on of row i / 4 of each.
__device__ __forceinline__ void read_matrices(Shared from, uint32_t (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
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
