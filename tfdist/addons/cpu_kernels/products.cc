// Products of a few rows and a matrix, which read the matrix once, as memory gives it.

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels.h"

namespace tfdist {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TfdistFewRowsMatMul")
    .Input("rows: float")
    .Input("matrix: float")
    .Output("product: float")
    .Attr("transpose_matrix: bool = false")
    .SetShapeFn([](InferenceContext* context) -> absl::Status {
      ShapeHandle rows, matrix;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 2, &rows));
      TF_RETURN_IF_ERROR(context->WithRank(context->input(1), 2, &matrix));
      bool transposed;
      TF_RETURN_IF_ERROR(context->GetAttr("transpose_matrix", &transposed));
      DimensionHandle summed;
      TF_RETURN_IF_ERROR(
          context->Merge(context->Dim(rows, 1), context->Dim(matrix, transposed), &summed));
      context->set_output(
          0, context->Matrix(context->Dim(rows, 0), context->Dim(matrix, !transposed)));
      return absl::OkStatus();
    })
    .Doc("[rows, n] times [n, columns], or times the transposed of [columns, n].");

// Of the product's columns so many are summed at a time: they stay in the nearest cache.
constexpr int64_t kColumns = 2048;
// So many rows, and rows of the matrix, are multiplied together.
constexpr int64_t kGroup = 4;

// Adds the products of four rows of the matrix.
TFDIST_CLONES void AddFour(const float* x, const float* matrix, int64_t stride, int64_t columns,
                           float* y) {
  const float *a = matrix, *b = a + stride, *c = b + stride, *d = c + stride;
  const float p = x[0], q = x[1], r = x[2], s = x[3];
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) y[i] += (p * a[i] + q * b[i]) + (r * c[i] + s * d[i]);
}

TFDIST_CLONES void AddOne(float x, const float* matrix, int64_t columns, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) y[i] += x * matrix[i];
}

// The columns `begin` to `end` of x [rows, n] times a matrix [n, stride].
void Columns(const float* x, int64_t rows, int64_t n, const float* matrix, int64_t stride,
             int64_t begin, int64_t end, float* y) {
  for (int64_t from = begin; from < end; from += kColumns) {
    const int64_t width = std::min(kColumns, end - from);
    for (int64_t row = 0; row < rows; ++row) std::fill_n(y + row * stride + from, width, 0.0f);
    int64_t i = 0;
    for (; i + kGroup <= n; i += kGroup) {
      for (int64_t row = 0; row < rows; ++row) {
        AddFour(x + row * n + i, matrix + i * stride + from, stride, width,
                y + row * stride + from);
      }
    }
    for (; i < n; ++i) {
      for (int64_t row = 0; row < rows; ++row) {
        AddOne(x[row * n + i], matrix + i * stride + from, width, y + row * stride + from);
      }
    }
  }
}

// The dot products of four rows with four of a matrix, which are columns of the product.
TFDIST_CLONES void FourByFour(const float* x, int64_t n, const float* matrix, int64_t stride,
                              float* y) {
  const float *x0 = x, *x1 = x0 + n, *x2 = x1 + n, *x3 = x2 + n;
  const float *a = matrix, *b = a + n, *c = b + n, *d = c + n;
  float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
  float c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
#pragma omp simd reduction(+ : a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)
  for (int64_t i = 0; i < n; ++i) {
    a0 += x0[i] * a[i], a1 += x1[i] * a[i], a2 += x2[i] * a[i], a3 += x3[i] * a[i];
    b0 += x0[i] * b[i], b1 += x1[i] * b[i], b2 += x2[i] * b[i], b3 += x3[i] * b[i];
    c0 += x0[i] * c[i], c1 += x1[i] * c[i], c2 += x2[i] * c[i], c3 += x3[i] * c[i];
    d0 += x0[i] * d[i], d1 += x1[i] * d[i], d2 += x2[i] * d[i], d3 += x3[i] * d[i];
  }
  float *y0 = y, *y1 = y0 + stride, *y2 = y1 + stride, *y3 = y2 + stride;
  y0[0] = a0, y0[1] = b0, y0[2] = c0, y0[3] = d0;
  y1[0] = a1, y1[1] = b1, y1[2] = c1, y1[3] = d1;
  y2[0] = a2, y2[1] = b2, y2[2] = c2, y2[3] = d2;
  y3[0] = a3, y3[1] = b3, y3[2] = c3, y3[3] = d3;
}

TFDIST_CLONES float Dot(const float* x, const float* a, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i] * a[i];
  return sum;
}

// The columns `begin` to `end` of x [rows, n] times the transposed of a matrix [stride, n].
void TransposedColumns(const float* x, int64_t rows, int64_t n, const float* matrix,
                       int64_t stride, int64_t begin, int64_t end, float* y) {
  const int64_t whole = rows - rows % kGroup;
  int64_t column = begin;
  for (; column + kGroup <= end; column += kGroup) {
    const float* part = matrix + column * n;
    for (int64_t row = 0; row < whole; row += kGroup) {
      FourByFour(x + row * n, n, part, stride, y + row * stride + column);
    }
    for (int64_t row = whole; row < rows; ++row) {
      for (int64_t i = 0; i < kGroup; ++i) {
        y[row * stride + column + i] = Dot(x + row * n, part + i * n, n);
      }
    }
  }
  for (; column < end; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      y[row * stride + column] = Dot(x + row * n, matrix + column * n, n);
    }
  }
}

class FewRowsMatMulKernel : public OpKernel {
 public:
  explicit FewRowsMatMulKernel(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("transpose_matrix", &transposed_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor &rows = context->input(0), &matrix = context->input(1);
    OP_REQUIRES(context,
                rows.dims() == 2 && matrix.dims() == 2 &&
                    rows.dim_size(1) == matrix.dim_size(transposed_),
                absl::InvalidArgumentError("A product takes [rows, n] and [n, columns]. Received: " +
                                           rows.shape().DebugString() + " and " +
                                           matrix.shape().DebugString()));
    const int64_t count = rows.dim_size(0), n = rows.dim_size(1);
    const int64_t columns = matrix.dim_size(!transposed_);
    Tensor* product = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, TensorShape({count, columns}), &product));
    const float *x = rows.flat<float>().data(), *m = matrix.flat<float>().data();
    float* y = product->flat<float>().data();
    const auto compute = transposed_ ? TransposedColumns : Columns;
    Share(context, columns, (1 + count) * n, [=](int64_t begin, int64_t end) {
      compute(x, count, n, m, columns, begin, end, y);
    });
  }

 private:
  bool transposed_;
};

REGISTER_KERNEL_BUILDER(Name("TfdistFewRowsMatMul").Device(tensorflow::DEVICE_CPU),
                        FewRowsMatMulKernel);

}  // namespace
}  // namespace tfdist
