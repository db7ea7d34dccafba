// What attention does with scores, in one pass over memory, where TensorFlow takes several.

#include <cmath>
#include <cstdint>

#include "exponential.h"
#include "kernels.h"

namespace tfdist {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfdistSoftmax")
    .Input("scores: float")
    .Output("weights: float")
    .Output("lse: float")
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(context->WithRankAtLeast(context->input(0), 1, &rows));
      TF_RETURN_IF_ERROR(context->ReplaceDim(rows, -1, context->MakeDim(1), &rows));
      context->set_output(0, context->input(0));
      context->set_output(1, rows);
      return absl::OkStatus();
    })
    .Doc("The softmax of each row of [..., columns], and its log-sum-exp: [..., 1].");

REGISTER_OP("TfdistSoftmaxGradient")
    .Input("exponents: float")
    .Input("dy: float")
    .Output("weights: float")
    .Output("dx: float")
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(context->Merge(context->input(0), context->input(1), &shape));
      context->set_output(0, shape);
      context->set_output(1, shape);
      return absl::OkStatus();
    })
    .Doc("Of scores less their log-sum-exp the softmax, and its product with `dy`.");

// The weights may lie where the scores lay.
TFDIST_CLONES void Softmax(const float* scores, int64_t rows, int64_t columns, float* weights,
                           float* lse) {
  for (int64_t row = 0; row < rows; ++row, scores += columns, weights += columns) {
    float highest = -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t i = 0; i < columns; ++i) highest = scores[i] > highest ? scores[i] : highest;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < columns; ++i) {
      const float weight = Weight(scores[i] - highest);
      weights[i] = weight;
      sum += weight;
    }
    const float inverse = 1 / sum;
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) weights[i] *= inverse;
    lse[row] = highest + std::log(sum);
  }
}

// What comes out may lie where what went in lay, element for element.
TFDIST_CLONES void SoftmaxGradient(const float* exponents, const float* dy, int64_t count,
                                   float* weights, float* dx) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float weight = Weight(exponents[i]);
    dx[i] = weight * dy[i];
    weights[i] = weight;
  }
}

class SoftmaxKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& scores = context->input(0);
    TensorShape lines = scores.shape();
    OP_REQUIRES(context, lines.dims() > 0,
                absl::InvalidArgumentError("Scores have a dim of columns. Received: []"));
    const int64_t columns = lines.dim_size(lines.dims() - 1);
    lines.set_dim(lines.dims() - 1, 1);
    Tensor *weights = nullptr, *sums = nullptr;
    const float* x = scores.flat<float>().data();
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, scores.shape(), &weights));
    OP_REQUIRES_OK(context, context->allocate_output(1, lines, &sums));
    float *y = weights->flat<float>().data(), *lse = sums->flat<float>().data();
    Share(context, lines.num_elements(), 6 * columns, [=](int64_t begin, int64_t end) {
      Softmax(x + begin * columns, end - begin, columns, y + begin * columns, lse + begin);
    });
  }
};

class SoftmaxGradientKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &exponents = context->input(0), &gradient = context->input(1);
    OP_REQUIRES_OK(context, OneShape("A gradient has the shape of its weights", exponents.shape(),
                                     gradient.shape()));
    const float *x = exponents.flat<float>().data(), *dy = gradient.flat<float>().data();
    Tensor *weights = nullptr, *found = nullptr;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, exponents.shape(), &weights));
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({1}, 1, exponents.shape(), &found));
    float *y = weights->flat<float>().data(), *dx = found->flat<float>().data();
    Share(context, exponents.NumElements(), 4, [=](int64_t begin, int64_t end) {
      SoftmaxGradient(x + begin, dy + begin, end - begin, y + begin, dx + begin);
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistSoftmax").Device(tensorflow::DEVICE_CPU), SoftmaxKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistSoftmaxGradient").Device(tensorflow::DEVICE_CPU),
                        SoftmaxGradientKernel);

}  // namespace
}  // namespace tfdist
