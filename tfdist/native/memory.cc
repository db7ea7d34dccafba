// How much memory the tensors of this process take, as TensorFlow's CPU allocator counts it.

#include <cstdint>

#include "tensorflow/core/framework/allocator.h"

extern "C" {

// From here on allocations are counted; those of before are not. Call it before the first tensor.
void tfdist_count_memory() { tensorflow::EnableCPUAllocatorStats(); }

// Returns 1 and the bytes in use, and the most that were since the peak was reset; 0 where they
// are not counted.
int tfdist_memory(int64_t* in_use, int64_t* peak) {
  auto stats = tensorflow::cpu_allocator()->GetStats();
  if (!stats.has_value()) return 0;
  *in_use = stats->bytes_in_use;
  *peak = stats->peak_bytes_in_use;
  return 1;
}

void tfdist_reset_peak() { tensorflow::cpu_allocator()->ClearStats(); }
}
