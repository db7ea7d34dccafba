#ifndef TFDIST_NATIVE_KERNELS_H_
#define TFDIST_NATIVE_KERNELS_H_

// What kernels that go through tensors element by element have in common.

#include <cstdint>
#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

// Before a function whose loops are compiled for several kinds of processor; the first call chooses.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define TFDIST_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TFDIST_CLONES
#endif

namespace tfdist {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// An error that begins with `rule` unless the shapes are equal.
inline absl::Status OneShape(const std::string& rule, const TensorShape& shape,
                             const TensorShape& other) {
  if (shape == other) return absl::OkStatus();
  return absl::InvalidArgumentError(rule + ". Received: " + shape.DebugString() + " and " +
                                    other.DebugString());
}

// Calls work(begin, end) for parts of 0 to `count` on the threads of the device; one of them costs
// about `cycles`.
template <typename Work>
void Share(OpKernelContext* context, int64_t count, int64_t cycles, const Work& work) {
  auto workers = context->device()->tensorflow_cpu_worker_threads();
  tensorflow::Shard(workers->num_threads, workers->workers, count, cycles, work);
}

}  // namespace tfdist

#endif  // TFDIST_NATIVE_KERNELS_H_
