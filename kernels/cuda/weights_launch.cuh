// The kernel of weights.cuh on a card: how its work is cut, and its launch.
#pragma once

#include <algorithm>
#include <atomic>

#include "weights_direct.cuh"

namespace ixt {
namespace {

constexpr int kMaxDevices = 64;

struct Card {
  int processors, shared_bytes;
};

inline Card card_of(int device) {
  static std::atomic<int64_t> known[kMaxDevices];
  IXT_CHECK(device >= 0 && device < kMaxDevices, "device index must be below 64, got ", device);
  int64_t both = known[device].load(std::memory_order_relaxed);
  if (both == 0) {
    Card card{};
    check_cuda(cudaDeviceGetAttribute(&card.processors, cudaDevAttrMultiProcessorCount, device),
               "processors");
    check_cuda(
        cudaDeviceGetAttribute(&card.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "shared memory");
    both = int64_t{card.processors} << 32 | card.shared_bytes;
    known[device].store(both, std::memory_order_relaxed);
  }
  return {static_cast<int>(both >> 32), static_cast<int>(both & 0xFFFFFFFF)};
}

// Bytes of a tile in a stage, and of the rings of a block.
template <Code C, int NT>
int tile_bytes(const DecodeArgs& a) {
  const int entry_bytes = a.entries * kTileRows * 4;
  return Layout<C, NT>::tile + (a.scale ? entry_bytes : 0) + (a.packed ? entry_bytes : 0);
}

template <Code C, int NT>
int ring_bytes(const DecodeArgs& a, int tiles, int stages) {
  return kWarps * stages * (Layout<C, NT>::x_bytes + tiles * tile_bytes<C, NT>(a));
}

template <int NT>
int for_rings(int shared_bytes) {  // what write_tiles leaves
  return shared_bytes - 2 * kWarps * 8 * NT * kColumn * static_cast<int>(sizeof(float));
}

// Cut the work for `blocks` blocks; returns the bytes of the rings.
template <Code C, int NT>
int plan(DecodeArgs& a, int blocks, int shared_bytes) {
  using L = Layout<C, NT>;
  const int most = (a.tiles + blocks - 1) / blocks;  // tiles of a block
  const int available = for_rings<NT>(shared_bytes);
  int fit = L::tiles;
  while (fit > 1 && ring_bytes<C, NT>(a, fit, 2) > available) --fit;
  const int passes = (most + fit - 1) / fit;
  a.pass_tiles = (most + passes - 1) / passes;
  a.scale_at = L::x_bytes + a.pass_tiles * L::tile;
  a.packed_at = a.scale_at + (a.scale ? a.pass_tiles * a.entries * kTileRows * 4 : 0);
  a.stage_bytes = L::x_bytes + a.pass_tiles * tile_bytes<C, NT>(a);
  a.stages = std::clamp(available / (kWarps * a.stage_bytes), 2, kMostStages);
  return kWarps * a.stages * a.stage_bytes;
}

template <Code C, bool Packed, typename T, int NT>
void run_decode(DecodeArgs& a, Target target) {
  const Card card = card_of(target.device);
  const int blocks = std::min(a.tiles, card.processors);
  const int bytes = plan<C, NT>(a, blocks, card.shared_bytes);
  auto* kernel = &multiply_weights<C, Packed, T, NT>;
  static std::atomic<int> allowed[kMaxDevices];  // bytes, of this kernel
  if (bytes > allowed[target.device].load(std::memory_order_relaxed)) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory of a kernel");
    allowed[target.device].store(bytes, std::memory_order_relaxed);
  }
  kernel<<<blocks, kThreads, bytes, target.stream>>>(a);
  check_cuda(cudaGetLastError(), "kernel launch");
}

template <Code C, bool Packed, int NT>
void run_decode(DecodeArgs& a, Float x, Target target) {
  x == Float::bf16 ? run_decode<C, Packed, bf16, NT>(a, target)
                   : run_decode<C, Packed, f16, NT>(a, target);
}

// Whether a step of the direct kernel is within a group.
template <Code C>
bool takes_direct(const DecodeArgs& a) {
  return 1 << std::min(a.group_shift, 20) >= Step<C, false, bf16, 1>::length;
}

// Whether registers allow the refilled form: not for codes of 4 bits and 16 rows of x or four tiles.
template <Code C, bool Packed, typename T, int NT, int Tiles>
constexpr bool refilled() {
  return !Packed && (Decoder<C, T>::bits == 8 || (NT == 1 && Tiles == 2));
}

template <Code C, bool Packed, typename T, int NT, int Tiles>
void run_direct(const DecodeArgs& a, int threads, Target target) {
  const int blocks = (a.n + Tiles * kTileRows - 1) / (Tiles * kTileRows);
  if constexpr (refilled<C, Packed, T, NT, Tiles>()) {
    if (threads == kDirectThreads) {
      // Four tiles come without scales of groups.
      auto* kernel = a.scale == nullptr ? multiply_refilled<C, T, NT, Tiles, false>
                                        : multiply_refilled<C, T, NT, 2, true>;
      launch(kernel, blocks, threads, target.stream, false, a);
      return;
    }
  }
  launch(multiply_direct<C, Packed, T, NT, Tiles>, blocks, threads, target.stream, false, a);
}

// Four tiles a block where that makes nearly a block a processor and registers allow, since each
// block reads x; those of the refilled form do not allow it with scales of groups. The warps, and so
// the order of a sum, do not depend on m.
template <Code C, bool Packed, typename T>
void run_direct(const DecodeArgs& a, Target target) {
  const int threads = a.n <= 4 * kTileRows * 132 ? kDirectThreads : kDirectThreads / 2;
  const bool grouped = !Packed && a.scale != nullptr && threads == kDirectThreads;
  if (a.m > 8) {
    run_direct<C, Packed, T, 2, 2>(a, threads, target);
  } else if (a.n < 4 * kTileRows * 112 || grouped) {
    run_direct<C, Packed, T, 1, 2>(a, threads, target);
  } else {
    run_direct<C, Packed, T, 1, 4>(a, threads, target);
  }
}

// Packed: with a.packed, for which the kernel is another one.
template <Code C, bool Packed>
void launch_decode(DecodeArgs& a, Float x, Target target) {
  if constexpr (C != Code::e2m1 && C != Code::e5m2 && (C == Code::int4 || !Packed)) {
    if (takes_direct<C>(a)) {
      return x == Float::bf16 ? run_direct<C, Packed, bf16>(a, target)
                              : run_direct<C, Packed, f16>(a, target);
    }
  }
  a.tiles = (a.n + kTileRows - 1) / kTileRows;
  // A unit of e2m1 has two groups, whose bytes are copied together.
  a.entry_shift = std::clamp(a.group_shift - 5, 0, Layout<C, 1>::bits == 8 ? 1 : 2);
  a.entries = Layout<C, 1>::units >> a.entry_shift;
  if (a.m <= 8) return run_decode<C, Packed, 1>(a, x, target);
  if (ring_bytes<C, 2>(a, 1, 2) <= for_rings<2>(card_of(target.device).shared_bytes)) {
    return run_decode<C, Packed, 2>(a, x, target);
  }
  // A card with little shared memory reads a 4-bit weight twice.
  DecodeArgs rest = a;
  rest.x = static_cast<const uint16_t*>(a.x) + int64_t{8} * a.k;
  rest.y = static_cast<uint16_t*>(a.y) + int64_t{8} * a.n;
  rest.m = a.m - 8;
  a.m = 8;
  run_decode<C, Packed, 1>(a, x, target);
  run_decode<C, Packed, 1>(rest, x, target);
}

}  // namespace
}  // namespace ixt
