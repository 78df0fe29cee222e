// Zeros for the counters and maxima of the kernel that comes next. A memset would end before that
// one starts; this ends while it reads.
#include "fp8_launch.h"

namespace ixt {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) clear(uint32_t* words, int64_t count) {
  pdl_trigger();
  const int64_t at = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (at < count) words[at] = 0;
}

}  // namespace

void launch_clear(void* words, int64_t count, Target target) {
  launch(clear, (count + kThreads - 1) / kThreads, kThreads, target.stream, false,
         static_cast<uint32_t*>(words), count);
}

}  // namespace ixt
