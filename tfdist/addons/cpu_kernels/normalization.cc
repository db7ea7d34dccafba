// Layer normalization (Ba et al. 2016) over the last dim, in one pass over memory each way.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace tfdist {
namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status OutputShapes(InferenceContext* context) {
  ShapeHandle rows;
  TF_RETURN_IF_ERROR(context->Subshape(context->input(0), 0, -1, &rows));
  context->set_output(0, context->input(0));
  context->set_output(1, rows);
  context->set_output(2, rows);
  return absl::OkStatus();
}

absl::Status GradientShapes(InferenceContext* context) {
  context->set_output(0, context->input(1));
  context->set_output(1, context->input(2));
  context->set_output(2, context->input(2));
  return absl::OkStatus();
}

REGISTER_OP("TfdistLayerNorm")
    .Input("x: float")
    .Input("scale: float")
    .Input("offset: float")
    .Output("y: float")
    .Output("mean: float")
    .Output("inverse: float")
    .Attr("epsilon: float")
    .SetShapeFn(OutputShapes)
    .Doc("[..., width] to the same; the mean and 1 / deviation of each row.");

REGISTER_OP("TfdistLayerNormGradient")
    .Input("dy: float")
    .Input("x: float")
    .Input("scale: float")
    .Input("mean: float")
    .Input("inverse: float")
    .Output("dx: float")
    .Output("dscale: float")
    .Output("doffset: float")
    .SetShapeFn(GradientShapes)
    .Doc("The gradients of TfdistLayerNorm.");

TFDIST_CLONES void Normalize(const float* x, const float* scale, const float* offset, int64_t rows,
                             int64_t width, float epsilon, float* y, float* means,
                             float* inverses) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += x[i];
    const float mean = sum / static_cast<float>(width);
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float inverse = 1 / std::sqrt(squares / static_cast<float>(width) + epsilon);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - mean) * inverse * scale[i] + offset[i];
    means[row] = mean;
    inverses[row] = inverse;
  }
}

// Adds what these rows give to `dscale` and `doffset`.
TFDIST_CLONES void Gradient(const float* dy, const float* x, const float* scale,
                            const float* means, const float* inverses, int64_t rows, int64_t width,
                            float* dx, float* dscale, float* doffset) {
  for (int64_t row = 0; row < rows; ++row, dy += width, x += width, dx += width) {
    const float mean = means[row], inverse = inverses[row];
    float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (int64_t i = 0; i < width; ++i) {
      sum += dy[i] * scale[i];
      along += dy[i] * scale[i] * ((x[i] - mean) * inverse);
    }
    sum /= static_cast<float>(width);
    along /= static_cast<float>(width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      const float normal = (x[i] - mean) * inverse, slope = dy[i];
      dscale[i] += slope * normal;
      doffset[i] += slope;
      dx[i] = inverse * (slope * scale[i] - sum - normal * along);
    }
  }
}

bool IsVector(const Tensor& tensor, int64_t size) {
  return tensor.dims() == 1 && tensor.NumElements() == size;
}

// The last dim, or 0 where there is none.
int64_t Width(const Tensor& tensor) {
  return tensor.dims() == 0 ? 0 : tensor.dim_size(tensor.dims() - 1);
}

class LayerNormKernel : public OpKernel {
 public:
  explicit LayerNormKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("epsilon", &epsilon_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &input = context->input(0), &scale = context->input(1),
                 &offset = context->input(2);
    const int64_t width = Width(input);
    OP_REQUIRES(context, width > 0 && IsVector(scale, width) && IsVector(offset, width),
                absl::InvalidArgumentError(
                    "Scale and offset are as long as the input's last dim. Received: " +
                    input.shape().DebugString() + ", " + scale.shape().DebugString() + ", " +
                    offset.shape().DebugString()));
    TensorShape lines = input.shape();
    lines.RemoveLastDims(1);
    Tensor *output = nullptr, *means = nullptr, *inverses = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, input.shape(), &output));
    OP_REQUIRES_OK(context, context->allocate_output(1, lines, &means));
    OP_REQUIRES_OK(context, context->allocate_output(2, lines, &inverses));
    const float* x = input.flat<float>().data();
    const float *by = scale.flat<float>().data(), *plus = offset.flat<float>().data();
    float* y = output->flat<float>().data();
    float *mean = means->flat<float>().data(), *inverse = inverses->flat<float>().data();
    const float epsilon = epsilon_;
    Share(context, lines.num_elements(), 4 * width, [=](int64_t begin, int64_t end) {
      Normalize(x + begin * width, by, plus, end - begin, width, epsilon, y + begin * width,
                mean + begin, inverse + begin);
    });
  }

 private:
  float epsilon_ = 0;
};

class LayerNormGradientKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor &slope = context->input(0), &input = context->input(1),
                 &scale = context->input(2), &means = context->input(3),
                 &inverses = context->input(4);
    const int64_t width = Width(input);
    OP_REQUIRES_OK(context, OneShape("A gradient has the shape of its input", slope.shape(),
                                     input.shape()));
    OP_REQUIRES(context, width > 0 && IsVector(scale, width),
                absl::InvalidArgumentError("The scale is as long as the input's last dim. Received: " +
                                           scale.shape().DebugString() + " and " +
                                           input.shape().DebugString()));
    const int64_t rows = input.NumElements() / width;
    OP_REQUIRES(context, means.NumElements() == rows && inverses.NumElements() == rows,
                absl::InvalidArgumentError("Each row has a mean and a deviation"));
    Tensor *output = nullptr, *scales = nullptr, *offsets = nullptr, parts;
    OP_REQUIRES_OK(context, context->allocate_output(0, input.shape(), &output));
    OP_REQUIRES_OK(context, context->allocate_output(1, scale.shape(), &scales));
    OP_REQUIRES_OK(context, context->allocate_output(2, scale.shape(), &offsets));
    // Sums of blocks of rows, then of blocks: the order does not depend on the number of threads.
    const int64_t blocks = (rows + kRows - 1) / kRows;
    OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_FLOAT,
                                                   TensorShape({blocks, 2, width}), &parts));
    const float *dy = slope.flat<float>().data(), *x = input.flat<float>().data();
    const float *by = scale.flat<float>().data(), *mean = means.flat<float>().data();
    const float* inverse = inverses.flat<float>().data();
    float *dx = output->flat<float>().data(), *part = parts.flat<float>().data();
    std::fill(part, part + blocks * 2 * width, 0.0f);
    Share(context, blocks, kRows * 8 * width, [=](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * kRows, at = first * width;
        float* sums = part + block * 2 * width;
        Gradient(dy + at, x + at, by, mean + first, inverse + first, std::min(kRows, rows - first),
                 width, dx + at, sums, sums + width);
      }
    });
    float *dscale = scales->flat<float>().data(), *doffset = offsets->flat<float>().data();
    std::fill(dscale, dscale + width, 0.0f);
    std::fill(doffset, doffset + width, 0.0f);
    for (int64_t block = 0; block < blocks; ++block, part += 2 * width) {
      for (int64_t i = 0; i < width; ++i) {
        dscale[i] += part[i];
        doffset[i] += part[width + i];
      }
    }
  }

 private:
  static constexpr int64_t kRows = 64;
};

REGISTER_KERNEL_BUILDER(Name("TfdistLayerNorm").Device(tensorflow::DEVICE_CPU), LayerNormKernel);
REGISTER_KERNEL_BUILDER(Name("TfdistLayerNormGradient").Device(tensorflow::DEVICE_CPU),
                        LayerNormGradientKernel);

}  // namespace
}  // namespace tfdist
