// Cross-entropy of labels and logits, with its gradient, in one pass over memory.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "exponential.h"
#include "kernels.h"

namespace tfdist {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfdistCrossEntropy")
    .Input("logits: float")
    .Input("labels: int32")
    .Output("loss: float")
    .Output("gradient: float")
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      ShapeHandle labels;
      TF_RETURN_IF_ERROR(context->Subshape(context->input(0), 0, -1, &labels));
      TF_RETURN_IF_ERROR(context->Merge(labels, context->input(1), &labels));
      context->set_output(0, labels);
      context->set_output(1, context->input(0));
      return absl::OkStatus();
    })
    .Doc("[..., classes] and [...] to the loss of each row, and its gradient for the logits.");

REGISTER_OP("TfdistExponentials")
    .Input("logits: float")
    .Input("highest: float")
    .Output("exponentials: float")
    .Output("sums: float")
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(context->Subshape(context->input(0), 0, -1, &rows));
      TF_RETURN_IF_ERROR(context->Merge(rows, context->input(1), &rows));
      context->set_output(0, context->input(0));
      context->set_output(1, rows);
      return absl::OkStatus();
    })
    .Doc("exp(logits - highest) of [..., classes] and [...], and the sum of each row.");

// The gradient may lie where the logits lay.
TFDIST_CLONES void CrossEntropy(const float* logits, const int32_t* labels, int64_t rows,
                                int64_t classes, float* losses, float* gradient) {
  for (int64_t row = 0; row < rows; ++row, logits += classes, gradient += classes) {
    float highest = logits[0];
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < classes; ++i) highest = logits[i] > highest ? logits[i] : highest;
    const float of_label = logits[labels[row]] - highest;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < classes; ++i) {
      const float share = Exponential(logits[i] - highest);
      gradient[i] = share;
      sum += share;
    }
    const float inverse = 1 / sum;
#pragma omp simd
    for (int64_t i = 0; i < classes; ++i) gradient[i] *= inverse;
    gradient[labels[row]] -= 1;
    losses[row] = std::log(sum) - of_label;
  }
}

// The exponentials may lie where the logits lay.
TFDIST_CLONES void Exponentials(const float* logits, const float* highest, int64_t rows,
                                int64_t classes, float* exponentials, float* sums) {
  for (int64_t row = 0; row < rows; ++row, logits += classes, exponentials += classes) {
    const float most = highest[row];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < classes; ++i) {
      const float found = Weight(logits[i] - most);
      exponentials[i] = found;
      sum += found;
    }
    sums[row] = sum;
  }
}

class CrossEntropyKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &logits = context->input(0), &labels = context->input(1);
    TensorShape lines = logits.shape();
    OP_REQUIRES(context, lines.dims() > 0,
                absl::InvalidArgumentError("Logits have a dim of classes. Received: []"));
    const int64_t classes = lines.dim_size(lines.dims() - 1), rows = labels.NumElements();
    lines.RemoveLastDims(1);
    OP_REQUIRES_OK(context,
                   OneShape("There is a label for each row of logits", lines, labels.shape()));
    const int32_t* label = labels.flat<int32_t>().data();
    const int32_t* outside = std::find_if(label, label + rows, [classes](int32_t each) {
      return each < 0 || each >= classes;
    });
    OP_REQUIRES(context, outside == label + rows,
                absl::InvalidArgumentError("Labels lie in [0, " + std::to_string(classes) +
                                           "). Received: " + std::to_string(*outside)));
    Tensor *losses = nullptr, *gradient = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, lines, &losses));
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 1, logits.shape(), &gradient));
    const float* x = logits.flat<float>().data();
    float *loss = losses->flat<float>().data(), *dx = gradient->flat<float>().data();
    Share(context, rows, 12 * classes, [=](int64_t begin, int64_t end) {
      CrossEntropy(x + begin * classes, label + begin, end - begin, classes, loss + begin,
                   dx + begin * classes);
    });
  }
};

class ExponentialsKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &logits = context->input(0), &highest = context->input(1);
    TensorShape lines = logits.shape();
    OP_REQUIRES(context, lines.dims() > 0,
                absl::InvalidArgumentError("Logits have a dim of classes. Received: []"));
    const int64_t classes = lines.dim_size(lines.dims() - 1), rows = highest.NumElements();
    lines.RemoveLastDims(1);
    OP_REQUIRES_OK(context, OneShape("There is a maximum for each row of logits", lines,
                                     highest.shape()));
    Tensor *exponentials = nullptr, *sums = nullptr;
    OP_REQUIRES_OK(context, context->forward_input_or_allocate_output({0}, 0, logits.shape(),
                                                                      &exponentials));
    OP_REQUIRES_OK(context, context->allocate_output(1, lines, &sums));
    const float *x = logits.flat<float>().data(), *most = highest.flat<float>().data();
    float *y = exponentials->flat<float>().data(), *sum = sums->flat<float>().data();
    Share(context, rows, 10 * classes, [=](int64_t begin, int64_t end) {
      Exponentials(x + begin * classes, most + begin, end - begin, classes, y + begin * classes,
                   sum + begin);
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistExponentials").Device(tensorflow::DEVICE_CPU),
                        ExponentialsKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistCrossEntropy").Device(tensorflow::DEVICE_CPU),
                        CrossEntropyKernel);

}  // namespace
}  // namespace tfdist
