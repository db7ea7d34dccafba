// Activations in one pass over memory, where TensorFlow takes one for each operation.

#include <cstdint>

#include "exponential.h"
#include "kernels.h"

namespace tfdist {
namespace {

REGISTER_OP("TfdistGelu")
    .Input("x: float")
    .Output("y: float")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The tanh approximation of GELU (Hendrycks and Gimpel 2016).");

REGISTER_OP("TfdistGeluGradient")
    .Input("dy: float")
    .Input("x: float")
    .Output("dx: float")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The gradient of TfdistGelu.");

constexpr float kRate = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

inline __attribute__((always_inline)) float Logistic(float x) {
  return 1.0f / (1.0f + Exponential(-x));
}

// `ivdep`: what comes out may lie where the input lay, element for element.
TFDIST_CLONES void Gelu(const float* x, int64_t count, float* y) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    y[i] = x[i] * Logistic(x[i] * (kRate + kRate * kCubic * x[i] * x[i]));
  }
}

TFDIST_CLONES void GeluGradient(const float* dy, const float* x, int64_t count, float* dx) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    const float square = x[i] * x[i];
    const float gate = Logistic(x[i] * (kRate + kRate * kCubic * square));
    const float slope = x[i] * (kRate + 3 * kRate * kCubic * square);
    dx[i] = dy[i] * gate * (1 + slope * (1 - gate));
  }
}

class GeluKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0}, 0, input.shape(), &output));
    const float* x = input.flat<float>().data();
    float* y = output->flat<float>().data();
    Share(context, input.NumElements(), 10,
          [=](int64_t begin, int64_t end) { Gelu(x + begin, end - begin, y + begin); });
  }
};

class GeluGradientKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& slope = context->input(0);
    const Tensor& input = context->input(1);
    OP_REQUIRES_OK(context, OneShape("A gradient has the shape of its input", slope.shape(),
                                     input.shape()));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context,
                   context->forward_input_or_allocate_output({0, 1}, 0, input.shape(), &output));
    const float* dy = slope.flat<float>().data();
    const float* x = input.flat<float>().data();
    float* dx = output->flat<float>().data();
    Share(context, input.NumElements(), 14, [=](int64_t begin, int64_t end) {
      GeluGradient(dy + begin, x + begin, end - begin, dx + begin);
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("TfdistGelu").Device(tensorflow::DEVICE_CPU), GeluKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistGeluGradient").Device(tensorflow::DEVICE_CPU),
                        GeluGradientKernel);

}  // namespace
}  // namespace tfdist
