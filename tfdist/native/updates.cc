// Updates of optimizers on a part of a parameter, which has no variable of its own.

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "unsupported/Eigen/CXX11/Tensor"

namespace tfdist {
namespace {

using tensorflow::Var;

REGISTER_OP("TfdistAdam")
    .Input("part: T")
    .Input("m: resource")
    .Input("v: resource")
    .Input("gradient: T")
    .Input("rate: T")
    .Input("beta_1: T")
    .Input("beta_2: T")
    .Input("epsilon: T")
    .Output("updated: T")
    .Attr("T: {float, double}")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("A step of Adam (Kingma and Ba 2015), with a rate that bears its corrections of bias.");

// The memory of a variable, for us alone: who has read it before keeps what it read.
template <typename T>
absl::Status Own(OpKernelContext* context, Var* variable, const Tensor& like, T** data) {
  Tensor* tensor = variable->tensor();
  TF_RETURN_IF_ERROR(
      OneShape("The moments have the shape of the part", tensor->shape(), like.shape()));
  if (tensor->dtype() != like.dtype()) {
    return absl::InvalidArgumentError("The moments have the part's type. Received: " +
                                      tensorflow::DataTypeString(tensor->dtype()) + " and " +
                                      tensorflow::DataTypeString(like.dtype()));
  }
  if (!tensor->RefCountIsOne()) {
    Tensor copy;
    TF_RETURN_IF_ERROR(context->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
    std::memcpy(copy.flat<T>().data(), tensor->flat<T>().data(), tensor->tensor_data().size());
    *tensor = copy;
  }
  *data = tensor->flat<T>().data();
  return absl::OkStatus();
}

template <typename T>
class AdamKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& part = context->input(0);
    const Tensor& gradient = context->input(3);
    OP_REQUIRES_OK(context, OneShape("A part and its gradient have one shape", part.shape(),
                                     gradient.shape()));
    tensorflow::core::RefCountPtr<Var> m, v;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 1), &m));
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &v));
    OP_REQUIRES(context, m.get() != v.get(),
                absl::InvalidArgumentError("The moments are two variables"));
    tensorflow::mutex_lock lock_m(*m->mu());
    tensorflow::mutex_lock lock_v(*v->mu());
    T* m_data = nullptr;
    T* v_data = nullptr;
    OP_REQUIRES_OK(context, Own(context, m.get(), part, &m_data));
    OP_REQUIRES_OK(context, Own(context, v.get(), part, &v_data));
    Tensor* updated = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, part.shape(), &updated));
    const T rate = Scalar(context, 4), beta_1 = Scalar(context, 5), beta_2 = Scalar(context, 6);
    const T epsilon = Scalar(context, 7);
    const T* p = part.flat<T>().data();
    const T* g = gradient.flat<T>().data();
    T* out = updated->flat<T>().data();
    Share(context, part.NumElements(), 20, [=](int64_t begin, int64_t end) {
      using Array = Eigen::Array<T, Eigen::Dynamic, 1>;
      const int64_t count = end - begin;
      Eigen::Map<Array> first(m_data + begin, count), second(v_data + begin, count);
      Eigen::Map<const Array> slope(g + begin, count), old(p + begin, count);
      first += (slope - first) * (T(1) - beta_1);
      second += (slope.square() - second) * (T(1) - beta_2);
      Eigen::Map<Array>(out + begin, count) = old - first * rate / (second.sqrt() + epsilon);
    });
  }

 private:
  static T Scalar(OpKernelContext* context, int place) {
    return context->input(place).scalar<T>()();
  }
};

#define REGISTER_ADAM(T)                                                                   \
  REGISTER_KERNEL_BUILDER(                                                                 \
      Name("TfdistAdam").Device(tensorflow::DEVICE_CPU).TypeConstraint<T>("T"), AdamKernel<T>)
REGISTER_ADAM(float);
REGISTER_ADAM(double);
#undef REGISTER_ADAM

}  // namespace
}  // namespace tfdist
